//! Secrets in command lines, masked before anybody sees them: in the log, in the report, in what `check` prints.
//!
//! What shows a secret is its name: `--password hunter2`, `--token=…`, `DB_PASSWORD=…`, `"ansible_become_pass": "…"`,
//! `Authorization: …`, and the password in a URL. A secret without a name cannot be told from any other word.

/// What stands in the place of a secret.
const MASK: &str = "***";

/// Names end in one of these when what they name is secret; dashes and underscores are one.
const SECRET_ENDINGS: [&str; 18] = [
    "password",
    "passwd",
    "passphrase",
    "pass",
    "pwd",
    "secret",
    "secrets",
    "token",
    "key",
    "apikey",
    "accesskey",
    "secretkey",
    "privatekey",
    "credential",
    "credentials",
    "authorization",
    "cookie",
    "pin",
];

/// Names that end so and are no secret.
const PUBLIC_ENDINGS: [&str; 4] = ["public_key", "pub_key", "sort_key", "primary_key"];

/// Short options with a secret behind them, by program.
const SHORT_OPTIONS: [(&str, &str); 2] = [("sshpass", "-p"), ("curl", "-u")];

/// A command line as one line, with quotes where a shell would need them, and without its secrets.
pub fn command_line<S: AsRef<str>>(arguments: &[S]) -> String {
    self::arguments(arguments).iter().map(|argument| quote(argument)).collect::<Vec<_>>().join(" ")
}

/// Arguments, the program first, without their secrets.
pub fn arguments<S: AsRef<str>>(arguments: &[S]) -> Vec<String> {
    let mut masked = Vec::with_capacity(arguments.len());
    let program = arguments.first().map_or("", |name| name.as_ref().rsplit('/').next().unwrap_or(""));
    let mut next_is_secret = false;
    for argument in arguments {
        let argument = argument.as_ref();
        masked.push(if next_is_secret { MASK.to_owned() } else { words(argument) });
        let option = argument.starts_with('-') && !argument.contains(['=', ' ', ':']);
        next_is_secret = !next_is_secret
            && (option && is_secret(argument.trim_start_matches('-')) || SHORT_OPTIONS.contains(&(program, argument)));
    }
    masked
}

/// The value of a variable, or the mask when its name says that it is secret.
pub fn variable(name: &str, value: &str) -> String {
    if is_secret(name) { MASK.to_owned() } else { words(value) }
}

fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase().replace('-', "_");
    let ends_in = |ending: &str| {
        name.strip_suffix(ending)
            .is_some_and(|before| before.is_empty() || before.ends_with(['_', '.']) || ending.len() > 4)
    };
    SECRET_ENDINGS.iter().any(|ending| ends_in(ending)) && !PUBLIC_ENDINGS.iter().any(|ending| name.ends_with(ending))
}

/// Masks what stands behind a secret name and `=` or `:`, behind a secret option in a line for a shell, and passwords in
/// URLs.
fn words(argument: &str) -> String {
    let mut out = String::with_capacity(argument.len());
    let mut rest = argument;
    loop {
        let sign = rest.find(['=', ':']);
        let Some(at) = secret_option(&rest[..sign.unwrap_or(rest.len())]).or(sign) else { break };
        let (before, after) = rest.split_at(at);
        let sign = &after[..1];
        out.push_str(before);
        out.push_str(sign);
        rest = &after[1..];
        if let Some(host) = rest.strip_prefix("//").filter(|_| sign == ":").and_then(user_info) {
            out.push_str(host.0);
            rest = host.1;
        } else if is_secret(name_before(before)) {
            let (gap, end) = secret_at(rest, sign);
            out.push_str(&rest[..gap]);
            if end > gap {
                out.push_str(MASK);
            }
            rest = &rest[end..];
        }
    }
    out + rest
}

/// Where the first secret option that stands alone ends, in a line of several words.
fn secret_option(text: &str) -> Option<usize> {
    text.match_indices(' ').map(|(at, _)| at).find(|at| {
        let option = text[..*at].rsplit(char::is_whitespace).next().unwrap_or("").trim_start_matches(['"', '\'']);
        option.starts_with('-') && !option.contains(['=', ':']) && is_secret(option.trim_start_matches('-'))
    })
}

/// The name that ends here, without the quotes of JSON around it.
fn name_before(text: &str) -> &str {
    let text = text.trim_end_matches(['"', '\'', '\\', ' ']);
    let start = text.rfind(|c: char| !(c.is_alphanumeric() || "_-.".contains(c)));
    text[start.map_or(0, |at| at + text[at..].chars().next().map_or(0, char::len_utf8))..].trim_start_matches('-')
}

/// Where the secret begins and ends.
fn secret_at(text: &str, sign: &str) -> (usize, usize) {
    let gap = text.len() - text.trim_start_matches([' ', '\\']).len();
    let value = &text[gap..];
    let end = match value.chars().next() {
        Some(quote @ ('"' | '\'')) => {
            let inner = value[1..].find(quote).map_or(value.len(), |at| at + 1);
            return (gap + 1, gap + inner);
        }
        // A header's value goes to the end; a setting's to the next one.
        _ if sign == ":" => value.find(['\n', ',', '}']),
        _ => value.find([' ', '\t', '\n', ',', ';', '&', '"', '\'']),
    };
    (gap, gap + end.unwrap_or(value.len()))
}

/// `user:password@` of a URL: what to print for it, and what follows.
fn user_info(text: &str) -> Option<(&str, &str)> {
    let end = text.find(['/', '?', '#', ' ']).unwrap_or(text.len());
    let at = text[..end].rfind('@')?;
    text[..at].contains(':').then(|| ("//***:***", &text[at..]))
}

/// Quotes a word that a shell would take apart, and shows what a terminal would act on.
fn quote(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_=+./,:@%^*".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    let shown: String =
        word.chars().map(|c| if c.is_control() { format!("\\x{:02x}", u32::from(c)) } else { c.into() }).collect();
    format!("'{}'", shown.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_masked_wherever_their_name_stands() {
        for (arguments, wanted) in [
            (&["x", "--password", "hunter2", "-v"][..], "x --password *** -v"),
            (&["x", "--password=hunter2"], "x --password=***"),
            (&["x", "--api-token", "hunter2"], "x --api-token ***"),
            (&["x", "--secret=hunter2,b"], "x --secret=***,b"),
            (&["env", "AWS_SECRET_ACCESS_KEY=hunter2", "x"], "env AWS_SECRET_ACCESS_KEY=*** x"),
            (&["x", "-e", "a=1 ansible_become_pass=hunter2 b=2"], "x -e 'a=1 ansible_become_pass=*** b=2'"),
            (
                &["x", "-e", "{\"ansible_ssh_pass\": \"hunter2\", \"a\": 1}"],
                "x -e '{\"ansible_ssh_pass\": \"***\", \"a\": 1}'",
            ),
            (&["x", "https://joe:hunter2@host/a"], "x https://***:***@host/a"),
            (&["x", "-H", "Authorization: Bearer hunter2"], "x -H 'Authorization: ***'"),
            (&["/usr/bin/sshpass", "-p", "hunter2", "ssh", "h"], "/usr/bin/sshpass -p *** ssh h"),
            (&["x", "PASSWORD='hunter 2' y"], "x 'PASSWORD='\\''***'\\'' y'"),
            (
                &["sh", "-c", "x --password hunter2 -v; y --token 'hunter 2'"],
                "sh -c 'x --password *** -v; y --token '\\''***'\\'''",
            ),
            (&["x --url http://h:80/a --api-token  hunter2 -v"], "'x --url http://h:80/a --api-token  *** -v'"),
            (&["x", "--apikey=hunter2"], "x --apikey=***"),
        ] {
            assert_eq!(command_line(arguments), wanted);
        }
    }

    #[test]
    fn what_is_no_secret_is_left_alone() {
        for text in [
            "sleep 1000",
            "x --keyboard us",
            "x --bypass on",
            "x a=b:c",
            "x --public-key f",
            "ssh -p 22 h",
            "x http://h:80/a",
        ] {
            let arguments: Vec<&str> = text.split(' ').collect();
            assert_eq!(command_line(&arguments), text);
        }
    }

    #[test]
    fn no_text_makes_the_mask_panic() {
        for text in [
            "",
            "=",
            ":",
            "é=",
            "password=é",
            "\"password\":",
            "token:\"",
            "://",
            "a://é:é@",
            "key=\\\"x\\\"",
            "ß密key=密",
        ] {
            let _ = command_line(&[text, text]);
        }
    }

    #[test]
    fn what_a_terminal_would_act_on_is_shown_instead() {
        assert_eq!(command_line(&["a\u{1b}[2Jb", ""]), "'a\\x1b[2Jb' ''");
    }
}
