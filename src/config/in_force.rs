//! What is in force, printed as the configuration file that would say it.

use super::value::TARGETS;
use super::{Config, ContainmentMode, LogFormat, SuccessStatus};
use crate::report::mask;
use std::fmt::{self, Display};
use toml::Value;
use tracing::Level;

pub(super) const CONTAINMENTS: [(&str, ContainmentMode); 4] = [
    ("auto", ContainmentMode::Auto),
    ("lineage", ContainmentMode::Lineage),
    ("cgroup", ContainmentMode::Cgroup),
    ("pidns", ContainmentMode::Pidns),
];

pub(super) const LOG_FORMATS: [(&str, LogFormat); 3] =
    [("auto", LogFormat::Auto), ("text", LogFormat::Text), ("json", LogFormat::Json)];

pub(super) const LOG_LEVELS: [(&str, Level); 5] = [
    ("error", Level::ERROR),
    ("warn", Level::WARN),
    ("info", Level::INFO),
    ("debug", Level::DEBUG),
    ("trace", Level::TRACE),
];

fn word<T: PartialEq>(words: &[(&'static str, T)], meaning: &T) -> Value {
    let found = words.iter().find(|(_, known)| known == meaning).map_or("", |(word, _)| word);
    found.into()
}

fn text(value: impl Display) -> Value {
    value.to_string().into()
}

/// Keys and what they are set to.
type Keys = Vec<(&'static str, Option<Value>)>;

impl Config {
    fn sections(&self) -> Vec<(&'static str, Keys)> {
        let argv: Vec<_> = self.command.argv.iter().map(|argument| argument.to_string_lossy()).collect();
        let environment =
            self.command.environment.iter().map(|(name, value)| (name.clone(), mask::variable(name, value).into()));
        let success = self.success_exit_status.iter().map(|status| match status {
            SuccessStatus::Code(code) => Value::from(i64::from(*code)),
            SuccessStatus::Signal(signal) => text(signal),
        });
        let map = self.signal_map.iter().map(|(from, to)| (from.to_string(), text(to)));
        let path = |path: &Option<std::path::PathBuf>| path.as_ref().map(|path| text(path.display()));
        let duration = |value| Some(text(humantime::format_duration(value)));
        let policy = &self.policy;
        vec![
            ("", vec![("name", self.name.as_ref().map(text))]),
            (
                "service",
                vec![
                    ("command", (!argv.is_empty()).then(|| mask::arguments(&argv).into())),
                    ("working-directory", path(&self.command.working_directory)),
                    ("environment", Some(Value::Table(environment.collect()))),
                    ("success-exit-status", Some(success.collect::<Vec<_>>().into())),
                    ("timeout", policy.run_timeout.and_then(duration)),
                ],
            ),
            (
                "stop",
                vec![
                    ("signal", Some(text(policy.stop_signal))),
                    ("target", Some(word(&TARGETS, &policy.stop_target))),
                    ("timeout", duration(policy.stop_timeout)),
                    ("leftover-timeout", duration(policy.leftover_timeout)),
                    ("kill-timeout", duration(policy.kill_timeout)),
                ],
            ),
            ("signals", vec![("map", Some(Value::Table(map.collect())))]),
            (
                "containment",
                vec![
                    ("mode", Some(word(&CONTAINMENTS, &self.containment))),
                    ("allow-keep", Some(self.allow_keep.into())),
                ],
            ),
            ("report", vec![("file", path(&self.report))]),
            (
                "log",
                vec![
                    ("format", Some(word(&LOG_FORMATS, &self.log_format))),
                    ("level", Some(word(&LOG_LEVELS, &self.log_level))),
                ],
            ),
        ]
    }
}

impl Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (section, keys)) in self.sections().into_iter().enumerate() {
            if number > 0 {
                writeln!(f, "\n[{section}]")?;
            }
            for (key, value) in keys {
                match value {
                    Some(value) => writeln!(f, "{key} = {value}")?,
                    None => writeln!(f, "# {key}: not set")?,
                }
            }
        }
        Ok(())
    }
}
