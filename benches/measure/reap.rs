//! What it costs to reap the orphans of a service that goes on, and whether their zombies pile up.

use std::ffi::OsString;
use std::io;
use std::thread;
use std::time::Duration;

use libc::pid_t;

use crate::bed::Scene;
use crate::bed::clock::{now, seconds};
use crate::bed::peer::Peer;
use crate::bed::procfs;
use crate::bed::program::Program;
use crate::bed::role;
use crate::bed::table::{Ratios, Table, median, quantile};
use crate::bed::wire;

use super::turns;

const ORPHANS: usize = 10_000;
/// Between two looks at the zombies: a look costs a tenth of that.
const LOOK: Duration = Duration::from_millis(10);
/// How long the supervisor may need for the last orphans.
const DRAINED: Duration = Duration::from_secs(2);
const LIMIT: Duration = Duration::from_secs(300);

/// The figures of one peer, an entry per round.
#[derive(Clone, Default)]
struct Samples {
    /// Milliseconds that the supervisor ran.
    cpu: Vec<f64>,
    /// Seconds that the service took.
    wall: Vec<f64>,
    /// The most zombies seen at once.
    zombies: Vec<f64>,
}

pub(super) fn take(scene: &Scene<'_>) -> io::Result<Vec<Table>> {
    let rounds = scene.rounds(3, 1);
    let subreapers: Vec<&Peer> = scene.peers.iter().filter(|peer| peer.subreaper).collect();
    let inits: Vec<&Peer> = scene.peers.iter().collect();
    let ours: Vec<&Peer> = scene.peers.iter().filter(|peer| peer.ours).collect();
    let many = scene.rounds(10 * ORPHANS, 2 * ORPHANS);
    Ok(vec![
        side_by_side(scene, &subreapers, false, ORPHANS, rounds)?,
        side_by_side(scene, &inits, true, ORPHANS, rounds)?,
        side_by_side(scene, &ours, false, many, 1)?,
    ])
}

fn side_by_side(scene: &Scene<'_>, peers: &[&Peer], as_pid1: bool, orphans: usize, rounds: usize) -> io::Result<Table> {
    let mut samples = vec![Samples::default(); peers.len()];
    for round in 0..rounds {
        for turn in turns(peers.len(), round) {
            once(scene, peers[turn], as_pid1, orphans, &mut samples[turn])?;
            scene.bed.clear();
        }
    }
    let place = if as_pid1 { "as PID 1" } else { "as subreaper" };
    let title = format!("reap: {orphans} orphans, one after the other, {place}, median of {rounds}");
    let head = ["", "CPU ms", "ratio", "µs per orphan", "most zombies", "service s"];
    let mut table = Table::new(title, &head);
    let ratios = Ratios::to_best(peers.iter().zip(&samples).map(|(peer, of)| (median(&of.cpu), peer.ours)));
    for (peer, of) in peers.iter().zip(&samples) {
        let cpu = median(&of.cpu);
        table.row([
            peer.name.clone(),
            format!("{cpu:.0}"),
            ratios.of(cpu),
            format!("{:.1}", cpu * 1e3 / orphans as f64),
            format!("{:.0}", quantile(&of.zombies, 1.0)),
            format!("{:.2}", median(&of.wall)),
        ]);
    }
    for peer in scene.peers.iter().filter(|peer| !as_pid1 && !peer.subreaper) {
        table.remark(format!("{} is no subreaper: nothing falls to it", peer.name));
    }
    Ok(table)
}

fn once(scene: &Scene<'_>, peer: &Peer, as_pid1: bool, orphans: usize, samples: &mut Samples) -> io::Result<()> {
    let command: [OsString; 4] =
        [scene.itself.clone().into(), role::FLAG.into(), "churn".into(), orphans.to_string().into()];
    let (mut wire, theirs) = wire::pair()?;
    Program::new(peer.running(&command))?.with_wire(&theirs).in_namespace(as_pid1).start()?;
    drop(theirs);
    wire.word(LIMIT)?;
    let supervisor = procfs::running(&peer.program);
    let ran = || supervisor.iter().map(|&pid| procfs::run_time(pid)).sum::<u64>();
    let (before, begin) = (ran(), now());
    wire.go()?;
    let mut most = 0;
    let end = loop {
        let word = wire.word_if(LOOK)?;
        most = most.max(zombies(&supervisor));
        if let Some(word) = word {
            break word.time;
        }
        if seconds(begin, now()) > LIMIT.as_secs_f64() {
            return Err(io::Error::other(format!("{}: the service is not done after {LIMIT:?}", peer.name)));
        }
    };
    let drained = now() + 1_000_000 * u64::try_from(DRAINED.as_millis()).map_err(io::Error::other)?;
    while zombies(&supervisor) > 0 && now() < drained {
        thread::sleep(LOOK);
    }
    samples.cpu.push((ran() - before) as f64 / 1e6);
    samples.wall.push(seconds(begin, end));
    samples.zombies.push(most as f64);
    Ok(())
}

/// Ended processes that the supervisor has not reaped yet.
fn zombies(supervisor: &[pid_t]) -> usize {
    let waits =
        |pid: &pid_t| procfs::stat(*pid).is_some_and(|stat| stat.state == 'Z' && supervisor.contains(&stat.parent));
    procfs::pids().iter().filter(|pid| waits(pid)).count()
}
