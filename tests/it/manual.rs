//! The manual page says what there is, and can be read.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::need_program;

fn page() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/man/supervise.1")
}

/// Without the escapes of the format.
fn text() -> String {
    fs::read_to_string(page()).unwrap().replace("\\-", "-").replace("\\fI", "").replace("\\fR", "").replace("\\fB", "")
}

fn help() -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_supervise")).arg("--help").output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_manual_has_every_option_and_command_of_the_help() {
    let (help, text) = (help(), text());
    let words = help.split_whitespace().map(|word| word.trim_end_matches([',', '.', '"']));
    let options: Vec<&str> = words.filter(|word| word.starts_with("--") && word.len() > 2).collect();
    assert!(options.len() >= 12, "{options:?}");
    for option in options {
        assert!(text.contains(option.trim_end_matches("...")), "{option}");
    }
    let commands = help.split_once("Commands:\n").unwrap().1.lines().take_while(|line| !line.is_empty());
    for command in commands.filter_map(|line| line.split_whitespace().next()) {
        assert!(text.contains(&format!("supervise {command}")), "{command}");
    }
}

#[test]
fn the_manual_has_every_exit_code() {
    let text = text();
    for code in ["2", "123", "124", "125", "126", "127"] {
        let entries = [format!(".B {code}\n"), ".BR 126 \", \" 127\n".to_owned()];
        assert!(text.contains(&entries[0]) || entries[1].contains(code) && text.contains(&entries[1]), "{code}");
    }
}

#[test]
fn the_manual_is_formatted_without_a_warning() {
    if !need_program("groff") {
        return;
    }
    let output = Command::new("groff").args(["-man", "-ww", "-Tutf8", "-P-cbou"]).arg(page()).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).contains("NAMED RUNS"));
}
