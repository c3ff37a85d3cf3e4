//! What is said when all is over: the cause first, then what was ended, then who could not be, then the report.

use crate::config::{LogFormat, SuccessStatus};
use crate::effects::Outcome;
use crate::guard::{End, Lost};
use crate::process::terminal::{Caller, Terminal};
use crate::report::{self, Destination, Left, Record, Run};
use crate::supervisor::Verdict;
use crate::{cli, log};
use std::io;
use std::time::Duration;
use tracing::{Level, error, info, warn};

/// A run as the supervisor saw it to its end.
#[derive(Debug)]
pub struct Ended {
    /// What the hands of the core know.
    pub outcome: Outcome,
    /// What the core says.
    pub verdict: Verdict,
    /// What was ended before the start.
    pub swept: Left,
    /// How long it took in all.
    pub whole_time: Duration,
}

impl Ended {
    /// All of it in one.
    pub fn into_run(self, success: &[SuccessStatus]) -> Run {
        let Ended { outcome, verdict, swept, whole_time } = self;
        let Outcome { record, leftovers, start_error, service_ended } = outcome;
        let kind = start_error.as_ref().map(|error| error.kind);
        Run {
            lost: verdict.guard_lost.then_some(report::Lost::Guard),
            success: verdict.exit.is_some_and(|exit| cli::is_success(exit, success)),
            start_error: start_error.map(|error| error.to_string()),
            left: Left::new(leftovers, whole_time.saturating_sub(service_ended.unwrap_or_default().0)),
            swept,
            exit_code: cli::exit_code(&verdict, kind, success),
            ..record.run(verdict, whole_time)
        }
    }
}

/// A sweep after which nothing was started.
pub fn swept_only(record: Record, swept: Left, verdict: Verdict, whole_time: Duration) -> Run {
    let lost = verdict.guard_lost.then_some(report::Lost::Guard);
    Run { lost, swept, exit_code: cli::exit_code(&verdict, None, &[]), ..record.run(verdict, whole_time) }
}

/// What was done before the start, in lines.
pub fn tell_what_was_swept(swept: &Left, some_live: bool) -> Vec<String> {
    [swept.summary("earlier runs", some_live), swept.kept()].into_iter().flatten().collect()
}

/// Says how it ended.
pub fn tell(run: &Run, run_timeout: Option<Duration>, report: Option<&mut Destination>) {
    if let Some(why) = &run.start_error {
        error!("{why}");
    }
    match run.lost {
        Some(report::Lost::Supervisor) if run.verdict.survivors => error!("the supervisor was killed"),
        Some(report::Lost::Supervisor) => error!("the supervisor was killed; its guard ended all that it had started"),
        Some(report::Lost::Guard) if run.verdict.survivors => error!("the guard was killed"),
        Some(report::Lost::Guard) => error!("the guard was killed; all that was started was ended"),
        None => {}
    }
    if let Some(limit) = run_timeout.filter(|_| run.verdict.timed_out) {
        warn!("the service was stopped: it ran longer than {}", humantime::format_duration(limit));
    }
    let left = [run.left.summary("the service", run.verdict.survivors), run.left.kept()];
    left.into_iter().flatten().for_each(|line| info!("{line}"));
    if let Some(line) = run.survivors() {
        error!("{line}");
    }
    if let Some(report) = report
        && let Err(why) = report.write(&run.to_json())
    {
        warn!("the report could not be written to {}: {}", report.path().display(), log::reason(&why));
    }
}

/// The guard's exit code: the supervisor's, or what comes of its loss.
pub fn mirror(end: End) -> u8 {
    match end {
        End::Orderly(code) => code,
        End::Stopped(signal) => {
            log::start(LogFormat::default(), Level::INFO);
            warn!("stopped by {signal} before the configuration was read to its end; nothing was started");
            cli::stopped_by(signal)
        }
        End::Lost(lost) => told_in_its_place(lost),
    }
}

fn told_in_its_place(lost: Lost) -> u8 {
    // The supervisor had lent it to the service.
    Terminal::find(Caller::ourselves()).take_back(None);
    let Some(record) = Record::from_text(&lost.record) else {
        log::start(LogFormat::default(), Level::INFO);
        error!("the supervisor {} before it had begun", lost.exit);
        return if lost.survivors { cli::SURVIVORS } else { cli::UNABLE };
    };
    log::start(record.log_format, record.log_level());
    let mut report = record.destination(lost.report);
    let run = record.lost(lost.leftovers, lost.survivors);
    tell(&run, None, report.as_mut());
    run.exit_code
}

/// Says what cannot be done, and that nothing was started for it.
pub fn unable(what: &str, why: &io::Error) -> u8 {
    error!("cannot {what}: {}; nothing was started", log::reason(why));
    cli::UNABLE
}
