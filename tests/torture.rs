//! Random trees, random deaths: whatever it was, nothing is left, and the exit code is the right one.
//!
//! For 2 s, or TORTURE_SECONDS. Every round has a seed of its own, which is all that it is made of; a failure prints it,
//! and TORTURE_SEED plays that one again. Then the same with guard, supervisor or service killed at a random moment, 60
//! times or TORTURE_DEATHS.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

#[path = "support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use libc::{SIGABRT, SIGHUP, SIGINT, SIGKILL, SIGSEGV, SIGTERM, SIGURG};
use support::tree::{Born, Node};
use support::{Act, Ended, Running, Supervise, node, sys};

/// The longest that the ladder of a round can take, many times over.
const BOUNDED: Duration = Duration::from_secs(50);

/// Small and known: the same seed is the same round everywhere. (xorshift64*)
struct Dice(u64);

impl Dice {
    fn new(seed: u64) -> Self {
        // Neighbours are to be strangers, and the state must not be 0.
        Self((seed.wrapping_add(1)).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, end: u32) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let high = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32;
        u32::try_from(high % u64::from(end)).unwrap()
    }

    fn one_in(&mut self, chances: u32) -> bool {
        self.below(chances) == 0
    }

    fn of<T: Copy>(&mut self, choice: &[T]) -> T {
        choice[self.below(u32::try_from(choice.len()).unwrap()) as usize]
    }
}

/// How the run comes to its end.
#[derive(Clone, Copy, Debug)]
enum Death {
    Exit(i32),
    Signal(i32),
    /// Somebody kills the main process.
    Killed,
    Stop {
        signal: i32,
        deaf: bool,
    },
    /// The main process catches the signal, makes a newborn and exits.
    StopWithNewborn(i32),
    Timeout {
        deaf: bool,
    },
}

impl Death {
    fn random(dice: &mut Dice) -> Self {
        match dice.below(6) {
            0 => Self::Exit(dice.of(&[0, 1, 42, 127, 255])),
            1 => Self::Signal(dice.of(&[SIGKILL, SIGSEGV, SIGABRT, SIGTERM, 34, 64])),
            2 => Self::Killed,
            3 => Self::StopWithNewborn(dice.of(&[0, 3])),
            4 => Self::Timeout { deaf: dice.one_in(2) },
            _ => Self::Stop { signal: dice.of(&[SIGTERM, SIGINT]), deaf: dice.one_in(2) },
        }
    }

    fn main(self, born: Born) -> Node {
        let main = node("main");
        match self {
            Self::Exit(code) => main.exit_when_up(code),
            Self::Signal(signal) => main.killed_by(signal),
            Self::StopWithNewborn(code) => main.on(SIGTERM, Act::NewbornThenExit(born, code)),
            Self::Stop { deaf: true, .. } | Self::Timeout { deaf: true } => main.ignores([SIGTERM, SIGINT]),
            Self::Killed | Self::Stop { .. } | Self::Timeout { .. } => main,
        }
    }

    fn code(self) -> i32 {
        match self {
            Self::Exit(code) | Self::StopWithNewborn(code) => code,
            Self::Signal(signal) | Self::Stop { signal, deaf: false } => 128 + signal,
            Self::Killed | Self::Stop { deaf: true, .. } => 128 + SIGKILL,
            Self::Timeout { .. } => 124,
        }
    }

    /// Whether the test brings it about, so that everybody is alive until then.
    fn is_ours(self) -> bool {
        matches!(self, Self::Killed | Self::Stop { .. } | Self::StopWithNewborn(_))
    }
}

fn born(dice: &mut Dice) -> Born {
    Born { ignored: if dice.one_in(2) { 1 << (SIGTERM - 1) } else { 0 }, setsid: dice.one_in(2) }
}

/// A process with what it leaves: at most `depth` levels, numbered in the order in which they are described.
fn random_node(dice: &mut Dice, depth: u32, count: &mut u32) -> Node {
    *count += 1;
    let mut it = node(&format!("n{count}"));
    it = match dice.below(8) {
        0 | 1 => it.setsid(),
        2 => it.subreaper(),
        _ => it,
    };
    it = match dice.below(6) {
        0 | 1 => it.ignores([SIGTERM, SIGHUP]),
        2 => it.reports([SIGTERM]),
        3 => {
            let born = born(dice);
            it.on(SIGTERM, dice.of(&[Act::Newborn(born), Act::NewbornThenExit(born, 0), Act::Exit(9)]))
        }
        _ => it,
    };
    if dice.one_in(8) {
        it = it.comm(dice.of(&["a) S b", ") Z 1", "((", " "]));
    }
    if depth > 0 {
        for _ in 0..dice.below(4) {
            it = it.with(random_child(dice, depth - 1, count));
        }
    }
    it
}

fn random_child(dice: &mut Dice, depth: u32, count: &mut u32) -> Node {
    if dice.one_in(10) {
        // Its parent is suspended as long as it lives.
        let leaf = node(&format!("v{count}")).vforked();
        *count += 1;
        let parent = node(&format!("n{count}"));
        return if dice.one_in(2) { parent.setsid() } else { parent }.with(leaf);
    }
    if dice.one_in(8) {
        *count += 1;
        return node(&format!("n{count}")).own_group().with(random_node(dice, 0, count));
    }
    let child = random_node(dice, depth, count);
    match dice.below(12) {
        0 => child.orphaned(),
        1 => child.daemonized(),
        2 => child.cloned(),
        3 => child.clone_parent(),
        4 => child.exit_signal(0),
        5 => child.exit_signal(SIGURG),
        6 => child.setsid().stopped(),
        7 => child.traced(),
        8 => child.leader_exits(),
        _ => child,
    }
}

#[derive(Debug)]
struct Round {
    death: Death,
    tree: Node,
    pid_one: bool,
    leftover_timeout: u32,
    /// Who is killed while the service runs.
    victims: Vec<String>,
    target: &'static str,
}

impl Round {
    fn random(seed: u64, root: bool) -> Self {
        let mut dice = Dice::new(seed);
        let death = Death::random(&mut dice);
        let mut count = 0;
        let mut tree = death.main(born(&mut dice));
        for _ in 0..dice.below(5) {
            tree = tree.with(random_child(&mut dice, 3, &mut count));
        }
        // With other targets a leftover may be asked to go before the main process has gone.
        let target = dice.of(&["main", "main", "group", "tree"]);
        let mut victims: Vec<String> = Vec::new();
        for _ in 0..dice.below(4) {
            let victim = format!("n{}", 1 + dice.below(count.max(1)));
            if death.is_ours() && count > 0 && !victims.contains(&victim) {
                victims.push(victim);
            }
        }
        let (pid_one, leftover_timeout) = (root && dice.one_in(5), dice.of(&[0, 20, 150]));
        Self { death, tree, pid_one, leftover_timeout, victims, target }
    }

    fn play(&self) -> Ended {
        let config = format!("[stop]\ntarget = \"{}\"\ntimeout = \"150ms\"\n", self.target);
        let leftover_timeout = format!("{}ms", self.leftover_timeout);
        let mut run = Supervise::new().config(&config).options(["--leftover-timeout", &leftover_timeout]);
        if matches!(self.death, Death::Timeout { .. }) {
            run = run.options(["--timeout", "200ms"]);
        }
        if self.pid_one {
            run = run.pid_one();
        }
        let mut run = run.guard(BOUNDED).rlimit(libc::RLIMIT_CORE, 0, 0).tree(self.tree.clone()).start();
        if !matches!(self.death, Death::Timeout { .. }) {
            run.wait_up();
        }
        for victim in &self.victims {
            run.signal_node(victim, SIGKILL);
        }
        match self.death {
            Death::Killed => run.signal_node("main", SIGKILL),
            Death::Stop { signal, .. } => run.signal(signal),
            Death::StopWithNewborn(_) => run.signal(SIGTERM),
            Death::Exit(_) | Death::Signal(_) | Death::Timeout { .. } => {}
        }
        run.finish()
    }

    fn check(&self, ended: &Ended) {
        // Nothing left is what `finish` has seen to.
        assert_eq!((ended.code, ended.signal), (Some(self.death.code()), None), "{ended}");
        assert_eq!(ended.fell, 0, "{ended}");
        assert!(ended.after_signal < BOUNDED, "{ended}");
        let leftovers = ended.report["leftovers"].as_array().unwrap();
        let fates = ["by itself", "SIGTERM", "SIGKILL"];
        assert!(leftovers.iter().all(|one| fates.contains(&one["ended"].as_str().unwrap())), "{ended}");
        let by_us = leftovers.iter().any(|one| one["ended"] != "by itself");
        assert!(!by_us || ended.stderr.contains("ended "), "{ended}");
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is no number: {text}")))
}

#[test]
fn nothing_is_left_of_random_trees_that_die_random_deaths() {
    let only = number("TORTURE_SEED");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let first = only.unwrap_or(now.as_secs() * 1_000_000);
    let end = Instant::now() + Duration::from_secs(number("TORTURE_SECONDS").unwrap_or(2));
    let root = is_root();
    let mut out = std::io::stderr();
    let _ = writeln!(out, "torture: first seed {first}");
    let (mut rounds, mut processes) = (0, 0);
    while rounds == 0 || (only.is_none() && Instant::now() < end) {
        let seed = first + rounds;
        let round = Round::random(seed, root);
        if let Err(cause) = catch_unwind(AssertUnwindSafe(|| round.check(&round.play()))) {
            let _ = writeln!(out, "torture: TORTURE_SEED={seed} failed: {round:#?}");
            resume_unwind(cause);
        }
        rounds += 1;
        processes += round.tree.count();
    }
    let _ = writeln!(out, "torture: {rounds} rounds, {processes} processes");
}

// Deaths of our own.

/// Who is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Victim {
    Guard,
    Supervisor,
    Service,
    /// Guard and supervisor, one right after the other: what the kernel does not end then is for the sweep.
    Both,
}

/// A random run in which somebody is killed at a random moment: of the start, of the service, of the clean-up.
#[derive(Debug)]
struct Killing {
    round: Round,
    victim: Victim,
    containment: &'static str,
    after: Duration,
    /// Whether and when it is asked to stop, so that the death may come in the midst of that.
    stop_after: Option<Duration>,
}

impl Killing {
    fn random(seed: u64) -> Self {
        let mut round = Round::random(seed, false);
        let mut dice = Dice::new(!seed);
        round.leftover_timeout = dice.of(&[0, 5, 20]);
        let victim = dice.of(&[Victim::Guard, Victim::Supervisor, Victim::Service, Victim::Both]);
        // What an ordinary user can have depends on the machine.
        let containment = if is_root() { dice.of(&["lineage", "cgroup", "pidns"]) } else { "lineage" };
        let mut moment = |reach| Duration::from_micros(dice.below(reach).into());
        // A start takes some ms, a tree some more, a clean-up tens of them.
        let (early, late, since_the_stop) = (moment(6_000), moment(60_000), moment(60_000));
        let (after, stop_after) = match dice.below(4) {
            0 => (early, None),
            1 => (late, None),
            _ => (late + since_the_stop, Some(late)),
        };
        Self { round, victim, containment, after, stop_after }
    }

    /// The pids, as far as they are known by the looks of the tree.
    fn pid(&self, run: &Running) -> Option<i32> {
        // One that hands over to PID 1 of a new namespace is no supervisor any more.
        let is_one = |pid: &i32| sys::stat(*pid).is_some_and(|stat| stat.comm == "supervisor");
        let hands_over = |pid: &i32| sys::children(*pid).iter().any(is_one);
        let child = |pid: i32| sys::children(pid).into_iter().find(|child| !hands_over(child));
        match self.victim {
            Victim::Guard | Victim::Both => Some(run.pid()),
            Victim::Supervisor => child(run.pid()),
            Victim::Service => child(run.pid()).and_then(child),
        }
    }

    /// Gives the end, and whether somebody was there to be killed.
    fn play(&self) -> (Ended, bool) {
        let leftover_timeout = format!("{}ms", self.round.leftover_timeout);
        let config = format!("[stop]\ntarget = \"{}\"\ntimeout = \"20ms\"\n", self.round.target);
        let name = Name::new();
        let run = Supervise::new().config(&config).options(["--leftover-timeout", &leftover_timeout]);
        let run = run.options(["--containment", self.containment, "--name", &name.0]);
        let runtime = run.dir().to_str().unwrap().to_owned();
        let run = run.env("XDG_RUNTIME_DIR", &runtime);
        let run = run.guard(BOUNDED).rlimit(libc::RLIMIT_CORE, 0, 0).tree(self.round.tree.clone());
        let began = Instant::now();
        let mut run = run.start();
        if let Some(stop_after) = self.stop_after {
            wait_until(began + stop_after);
            run.signal(SIGTERM);
        }
        wait_until(began + self.after);
        let supervisor = sys::children(run.pid()).first().copied();
        let killed = self.pid(&run).is_some_and(|pid| sys::kill(pid, SIGKILL).is_ok());
        if self.victim == Victim::Both {
            supervisor.into_iter().for_each(|pid| drop(sys::kill(pid, SIGKILL)));
            run.wait_end();
            if self.containment != "pidns" {
                name.sweep(&runtime);
            }
            return (run.finish_empty_within(BOUNDED), killed);
        }
        if self.victim == Victim::Guard {
            // What is left of it now ends by itself, or nobody ends it.
            let ended = run.finish_empty_within(BOUNDED);
            // Before the start there is nothing to report.
            let is_told = !ended.report.is_null();
            assert!(ended.signal != Some(SIGKILL) || is_told || ended.told.is_empty(), "{ended}");
            return (ended, killed);
        }
        // Whoever was not there yet, or any more, ends nothing.
        run.signal(SIGTERM);
        (run.finish(), killed)
    }

    fn check(&self, ended: &Ended) {
        let result = ended.report["result"].as_str();
        let end = (ended.code, ended.signal);
        match self.victim {
            Victim::Both => assert!(result != Some("survivors"), "{ended}"),
            Victim::Guard if end == (None, Some(SIGKILL)) => assert!(result != Some("supervisor-lost"), "{ended}"),
            // A stop before our first instructions; nothing was started.
            _ if end == (None, Some(SIGTERM)) => assert!(result.is_none(), "{ended}"),
            Victim::Supervisor if result.is_none() || result == Some("supervisor-lost") => {
                assert_eq!(end, (Some(125), None), "{ended}");
                assert!(ended.stderr.contains("the supervisor "), "{ended}");
            }
            _ => {
                assert!(ended.code.is_some() && ended.code != Some(123) && ended.code != Some(125), "{ended}");
                assert!(!["supervisor-lost", "guard-lost", "survivors"].contains(&result.unwrap()), "{ended}");
            }
        }
    }
}

/// The name of a run that no other has, and what there is of it in the file system.
struct Name(String);

impl Name {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        Self(format!("torture-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)))
    }

    /// Ends what a run left that could end nothing any more.
    fn sweep(&self, runtime: &str) {
        let mut sweep = std::process::Command::new(env!("CARGO_BIN_EXE_supervise"));
        sweep.args(["--leftover-timeout", "20ms", "sweep", &self.0]).env("XDG_RUNTIME_DIR", runtime);
        // The reader of names of a supervisor that was killed may hold the lock for a moment.
        let until = Instant::now() + BOUNDED;
        loop {
            let output = sweep.output().unwrap();
            let text = String::from_utf8_lossy(&output.stderr);
            if output.status.success() {
                return;
            }
            assert!(text.contains("is running already") && Instant::now() < until, "{text}");
        }
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        if is_root() {
            let _ = std::fs::remove_dir_all(format!("/run/supervise/{}", self.0));
        }
    }
}

fn is_root() -> bool {
    // SAFETY: no memory is involved.
    unsafe { libc::geteuid() == 0 }
}

fn wait_until(moment: Instant) {
    while Instant::now() < moment {
        let _ = sys::wait_readable(&[], Some(moment));
    }
}

/// TORTURE_DEATHS=10000 for the measure; the seed as above.
#[test]
fn nothing_is_left_when_one_of_us_is_killed_at_a_random_moment() {
    let only = number("TORTURE_SEED");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let first = only.unwrap_or(now.as_secs() * 1_000_000);
    let deaths = if only.is_some() { 1 } else { number("TORTURE_DEATHS").unwrap_or(60) };
    let mut out = std::io::stderr();
    let _ = writeln!(out, "torture: {deaths} deaths, first seed {first}");
    let (mut counts, mut results) = (BTreeMap::new(), BTreeMap::new());
    let mut done = 0;
    for seed in first.. {
        if done >= deaths {
            break;
        }
        let killing = Killing::random(seed);
        let round = || {
            let (ended, killed) = killing.play();
            killing.check(&ended);
            (ended.report["result"].as_str().unwrap_or("no report").to_owned(), killed)
        };
        let (result, killed) = catch_unwind(AssertUnwindSafe(round)).unwrap_or_else(|cause| {
            let _ = writeln!(out, "torture: TORTURE_SEED={seed} failed: {killing:#?}");
            resume_unwind(cause)
        });
        if killed || only.is_some() {
            done += 1;
            *counts.entry((killing.victim, killing.containment)).or_insert(0) += 1;
            *results.entry(result).or_insert(0) += 1;
        }
    }
    let _ = writeln!(out, "torture: deaths {counts:?}, told as {results:?}, survivors 0");
}
