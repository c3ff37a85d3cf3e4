//! What follows from what was found: who is left of a service when something dies. Pure.
//!
//! Each line here has its reason in `containment` and `guard`; tests/it/doctor.rs kills for real and compares.

use super::{Finding, Subject};
use serde::{Serialize, Serializer};
use std::fmt;

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Case {
    ServiceKilled,
    SupervisorKilled,
    GuardKilled,
    BothKilled,
    ForkBomb,
    OtherUser,
}

/// In the order in which they are shown.
pub(super) const CASES: [Case; 6] =
    [Case::ServiceKilled, Case::SupervisorKilled, Case::GuardKilled, Case::BothKilled, Case::ForkBomb, Case::OtherUser];

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Case::ServiceKilled => "service killed",
            Case::SupervisorKilled => "supervisor killed",
            Case::GuardKilled => "guard killed",
            Case::BothKilled => "both at once",
            Case::ForkBomb => "fork bomb",
            Case::OtherUser => "other uid (sudo)",
        })
    }
}

/// What holds the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Lineage,
    Cgroup,
    PidNamespace,
}

/// In the order in which they are shown.
pub(super) const WAYS: [Way; 3] = [Way::Lineage, Way::Cgroup, Way::PidNamespace];

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Way::Lineage => "lineage",
            Way::Cgroup => "cgroup",
            Way::PidNamespace => "pid-namespace",
        })
    }
}

impl Serialize for Way {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// What becomes of what the service started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Outcome {
    NothingLeft,
    NothingLeftAfterNextStart,
    #[serde(rename = "named-exit-123")]
    NamedExit123,
    MayLiveOn,
    /// `supervise` refuses to run here.
    NothingStarted,
}

impl Outcome {
    pub(super) fn text(self) -> &'static str {
        match self {
            Outcome::NothingLeft => "nothing is left",
            Outcome::NothingLeftAfterNextStart => "nothing is left after the next start of the same name",
            Outcome::NamedExit123 => "named and exit 123",
            Outcome::MayLiveOn => "may live on",
            Outcome::NothingStarted => "nothing is started",
        }
    }

    pub(super) fn short(self) -> &'static str {
        match self {
            Outcome::NothingLeftAfterNextStart => "until the next start",
            other => other.text(),
        }
    }
}

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Promise {
    pub(super) case: Case,
    pub(super) containment: Way,
    pub(super) promise: Outcome,
    /// How it is kept, or why there is no better one.
    pub(super) by: String,
}

/// What `--containment auto` takes here.
pub(super) fn auto(findings: &[Finding]) -> Way {
    let here = Here(findings);
    if here.has(Subject::PidOne) {
        Way::PidNamespace
    } else if here.can_run() && here.has(Subject::Cgroup) {
        Way::Cgroup
    } else {
        Way::Lineage
    }
}

/// One for each case and each containment that can be had.
pub(super) fn promises(findings: &[Finding]) -> Vec<Promise> {
    let here = Here(findings);
    let mut promises = Vec::new();
    for containment in here.ways() {
        for case in CASES {
            let (promise, by) = here.follows(case, containment);
            promises.push(Promise { case, containment, promise, by });
        }
    }
    promises
}

type Follows = (Outcome, String);

fn nothing_left(by: impl Into<String>) -> Follows {
    (Outcome::NothingLeft, by.into())
}

#[derive(Clone, Copy)]
struct Here<'f>(&'f [Finding]);

impl Here<'_> {
    fn has(self, subject: Subject) -> bool {
        self.0.iter().any(|finding| finding.name == subject && finding.available)
    }

    fn can_run(self) -> bool {
        [Subject::Subreaper, Subject::EmptinessProof, Subject::Events].into_iter().all(|subject| self.has(subject))
    }

    fn ways(self) -> Vec<Way> {
        // As PID 1 the kernel holds everybody, whatever else does.
        if self.has(Subject::PidOne) {
            return vec![Way::PidNamespace];
        }
        let can_be_had = |way: &Way| match way {
            Way::Lineage => true,
            Way::Cgroup => self.can_run() && self.has(Subject::Cgroup),
            // Its guard stays outside.
            Way::PidNamespace => self.can_run() && self.has(Subject::PrivateProc) && self.has(Subject::Guard),
        };
        WAYS.into_iter().filter(can_be_had).collect()
    }

    fn follows(self, case: Case, way: Way) -> Follows {
        if !self.can_run() {
            return (
                Outcome::NothingStarted,
                "supervise refuses to run without what is missing below: exit 125".into(),
            );
        }
        let has_guard = self.has(Subject::Guard) && !self.has(Subject::PidOne);
        match (case, has_guard) {
            (Case::GuardKilled, false) => nothing_left("there is no guard whose death could matter"),
            (Case::SupervisorKilled, false) if way != Way::PidNamespace => {
                let (promise, by) = self.held(Case::BothKilled, way);
                (promise, format!("there is no guard: {by}"))
            }
            _ => self.held(case, way),
        }
    }

    fn held(self, case: Case, way: Way) -> Follows {
        match way {
            Way::Lineage => self.by_lineage(case),
            Way::Cgroup => self.by_cgroup(case),
            Way::PidNamespace => self.by_pid_namespace(case),
        }
    }

    fn by_lineage(self, case: Case) -> Follows {
        if case == Case::BothKilled {
            return (
                Outcome::MayLiveOn,
                self.sweep().map_or_else(|why| why, |how| format!("until {how} proves that it is its own")),
            );
        }
        if !self.has(Subject::Proc) {
            let by = "without /proc only the service's own process group is found; exit 123 says so";
            return (Outcome::MayLiveOn, by.into());
        }
        let how = self.how_one_by_one();
        match case {
            Case::SupervisorKilled => nothing_left(format!("all falls to the guard, which kills until ECHILD{how}")),
            Case::GuardKilled => nothing_left(format!("the supervisor sees it at once, and kills until ECHILD{how}")),
            Case::ForkBomb => self.bomb_by_lineage(),
            Case::OtherUser => self.other_user_by_lineage(),
            Case::ServiceKilled | Case::BothKilled => {
                nothing_left(format!("orphans fall to the supervisor, which kills until ECHILD{how}"))
            }
        }
    }

    /// How those are signalled whom no group takes.
    fn how_one_by_one(self) -> &'static str {
        match (self.has(Subject::PidfdSendSignal), self.has(Subject::ProcChildren)) {
            (true, true) => "",
            (true, false) => "; found by reading all of /proc",
            (false, true) => "; by number, just looked up",
            (false, false) => "; found by reading all of /proc, by number",
        }
    }

    fn bomb_by_lineage(self) -> Follows {
        if !self.has(Subject::ProcChildren) {
            let by = "without children files only one level is found at a time; who is left after a minute is counted";
            return (Outcome::NamedExit123, by.into());
        }
        let pace = if self.has(Subject::Precedence) {
            "ahead of it (nice -20)"
        } else {
            "which takes an ordinary user longer"
        };
        nothing_left(format!("SIGKILL in rounds until ECHILD, {pace}{}", self.how_one_by_one()))
    }

    fn other_user_by_lineage(self) -> Follows {
        if self.has(Subject::SignalOtherUsers) {
            return nothing_left(format!("CAP_KILL: may be signalled as our own{}", self.how_one_by_one()));
        }
        let named = if self.has(Subject::ProcOfOthers) { "" } else { "; counted only, since /proc hides it" };
        (Outcome::NamedExit123, format!("may not be signalled (EPERM){named}"))
    }

    fn by_cgroup(self, case: Case) -> Follows {
        if case == Case::BothKilled {
            return match self.sweep() {
                Ok(_) => {
                    let who = if self.has(Subject::CgroupKill) { "whoever it runs as" } else { "as far as we may" };
                    let by = format!("that start kills what is in the recorded cgroup, {who}");
                    (Outcome::NothingLeftAfterNextStart, by)
                }
                Err(why) => (Outcome::MayLiveOn, why),
            };
        }
        if !self.has(Subject::CgroupKill) {
            // The members are killed one by one, as by the lineage.
            let (promise, by) = self.by_lineage(case);
            return (promise, format!("{by} (without cgroup.kill)"));
        }
        let who = match case {
            Case::SupervisorKilled => "the guard: ",
            Case::GuardKilled => "the supervisor sees it at once: ",
            _ => "",
        };
        let births =
            if self.has(Subject::PidsController) || self.has(Subject::CgroupFreeze) { "births stopped, " } else { "" };
        let whom = if case == Case::OtherUser { ", which asks for no rights over it" } else { "" };
        let entry = if self.has(Subject::CloneIntoCgroup) { "" } else { " (entered before exec, without clone3)" };
        nothing_left(format!("{who}{births}cgroup.kill until it is empty{whom}{entry}"))
    }

    fn by_pid_namespace(self, case: Case) -> Follows {
        let is_init_already = self.has(Subject::PidOne);
        match case {
            Case::SupervisorKilled | Case::BothKilled => nothing_left("the kernel ends the namespace with its PID 1"),
            Case::GuardKilled => nothing_left("the supervisor sees it at once; the namespace ends with it, its PID 1"),
            Case::ServiceKilled => nothing_left("all in the namespace is killed at once, until nobody is left"),
            Case::ForkBomb => nothing_left("kill(-1) takes all in the namespace at once"),
            // It was not made as we are, so by a user namespace.
            Case::OtherUser if !is_init_already && !self.has(Subject::PidNamespace) => {
                nothing_left("there is none: set-uid has no effect in a user namespace without that user")
            }
            Case::OtherUser if self.has(Subject::SignalOtherUsers) => nothing_left("kill(-1) takes it, by CAP_KILL"),
            Case::OtherUser => nothing_left("named, exit 123; then the kernel ends it with PID 1"),
        }
    }

    /// Who ends what guard and supervisor left, killed at the same instant; or why nobody does.
    fn sweep(self) -> Result<String, String> {
        let nobody = |why: &str| Err(format!("nobody sweeps at the next start: {why}"));
        if !self.has(Subject::Proc) {
            return nobody("without /proc nobody is found");
        }
        if !self.has(Subject::RuntimeDirectory) {
            return nobody("there is no runtime directory for a record");
        }
        let how = if self.has(Subject::PidfdOpen) { "" } else { " (looking again at times, without pidfd_open)" };
        Ok(format!("the next start with the same --name{how}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All that a promise asks for, but not whether we are PID 1.
    const ASKED: [Subject; 16] = [
        Subject::Subreaper,
        Subject::EmptinessProof,
        Subject::Events,
        Subject::Guard,
        Subject::SignalOtherUsers,
        Subject::Proc,
        Subject::ProcOfOthers,
        Subject::ProcChildren,
        Subject::PidfdSendSignal,
        Subject::Cgroup,
        Subject::CgroupKill,
        Subject::CgroupFreeze,
        Subject::PidNamespace,
        Subject::PrivateProc,
        Subject::RuntimeDirectory,
        Subject::Precedence,
    ];

    fn found(available: impl Fn(Subject) -> bool) -> Vec<Finding> {
        let one = |name| Finding { name, available: available(name), detail: String::new() };
        ASKED.into_iter().chain([Subject::PidOne]).map(one).collect()
    }

    fn promised(findings: &[Finding], case: Case, way: Way) -> Option<Outcome> {
        let all = promises(findings);
        all.iter().find(|one| one.case == case && one.containment == way).map(|one| one.promise)
    }

    fn but(missing: &[Subject]) -> Vec<Finding> {
        found(|subject| subject != Subject::PidOne && !missing.contains(&subject))
    }

    /// The higher, the better.
    fn rank(outcome: Outcome) -> u8 {
        match outcome {
            Outcome::NothingLeft => 4,
            Outcome::NothingLeftAfterNextStart => 3,
            Outcome::NamedExit123 => 2,
            Outcome::MayLiveOn => 1,
            Outcome::NothingStarted => 0,
        }
    }

    #[test]
    fn what_is_taken_away_makes_no_promise_better() {
        // Every 41st set of them: all take ten seconds.
        for all in (0_u32..1 << ASKED.len()).step_by(41) {
            let has =
                |set: u32, subject| ASKED.iter().position(|one| *one == subject).is_some_and(|at| set >> at & 1 != 0);
            let findings = found(|subject| has(all, subject));
            let made = promises(&findings);
            assert!(
                made.len().is_multiple_of(CASES.len()) && made.iter().any(|one| one.containment == auto(&findings))
            );
            assert!(made.iter().all(|one| !one.by.is_empty()));
            let missing = (0..ASKED.len()).filter(|at| all >> at & 1 == 0);
            for (at, before) in missing.map(|at| (at, found(|subject| has(all | 1 << at, subject)))) {
                for one in made.iter().filter(|one| one.case != Case::GuardKilled) {
                    let better = promised(&before, one.case, one.containment);
                    assert!(better.is_none_or(|better| rank(better) >= rank(one.promise)), "{:?}: {one:?}", ASKED[at]);
                }
            }
        }
    }

    #[test]
    fn without_lists_of_children_a_fork_bomb_may_win() {
        let missing = but(&[Subject::ProcChildren]);
        assert_eq!(promised(&missing, Case::ForkBomb, Way::Lineage), Some(Outcome::NamedExit123));
        assert_eq!(promised(&missing, Case::ForkBomb, Way::Cgroup), Some(Outcome::NothingLeft));
        assert_eq!(promised(&missing, Case::ServiceKilled, Way::Lineage), Some(Outcome::NothingLeft));
    }

    #[test]
    fn without_cgroup_kill_a_cgroup_promises_no_more_than_the_rights_over_its_members() {
        let missing = but(&[Subject::CgroupKill, Subject::SignalOtherUsers]);
        assert_eq!(promised(&missing, Case::OtherUser, Way::Cgroup), Some(Outcome::NamedExit123));
        assert_eq!(promised(&missing, Case::ServiceKilled, Way::Cgroup), Some(Outcome::NothingLeft));
    }

    #[test]
    fn without_a_record_nobody_sweeps() {
        for missing in [Subject::RuntimeDirectory, Subject::Proc] {
            let outcome = promised(&but(&[missing]), Case::BothKilled, Way::Cgroup);
            assert_eq!(outcome, Some(Outcome::MayLiveOn), "{missing}");
        }
        let whole = promised(&but(&[]), Case::BothKilled, Way::Cgroup);
        assert_eq!(whole, Some(Outcome::NothingLeftAfterNextStart));
    }
}
