//! The name of a service.

use std::fmt;
use std::str::FromStr;

/// The longest name, in bytes.
const LONGEST: usize = 64;

/// A name that is fit for a path, a command line and an environment: up to 64 letters, digits and `. _ @ : -`, not beginning
/// with `.` or `-`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name(String);

impl Name {
    /// What SUPERVISE_NAME says in the environment of a service of this name, which a user of this number runs.
    pub fn mark(&self, uid: u32) -> String {
        format!("{uid}/{self}")
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What was written is no name.
#[derive(Debug, PartialEq, Eq)]
pub struct NotAName(String);

impl fmt::Display for NotAName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} is not a name; use 1 to {LONGEST} letters (a-z, A-Z), digits and \". _ @ : -\", and begin with neither \".\" \
             nor \"-\"",
            self.0
        )
    }
}

impl std::error::Error for NotAName {}

impl FromStr for Name {
    type Err = NotAName;

    fn from_str(text: &str) -> Result<Name, NotAName> {
        let is_fit = |c: char| c.is_ascii_alphanumeric() || "._@:-".contains(c);
        let is_name = (1..=LONGEST).contains(&text.len()) && text.chars().all(is_fit) && !text.starts_with(['.', '-']);
        if is_name { Ok(Name(text.to_owned())) } else { Err(NotAName(text.to_owned())) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_fit_for_a_path_is_a_name() {
        for text in ["web", "a", "getty@tty1", "db-2.0_x:y", "0", &"x".repeat(64)] {
            assert_eq!(text.parse::<Name>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_could_leave_its_directory_or_look_like_an_option_is_none() {
        for text in ["", ".", "..", "../x", "a/b", ".hidden", "-n", "a b", "a\n", "ä", "a\0", &"x".repeat(65)] {
            let why = text.parse::<Name>().unwrap_err().to_string();
            assert!(why.contains("begin with neither"), "{why}");
        }
    }
}
