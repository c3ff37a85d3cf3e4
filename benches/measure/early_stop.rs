//! Whether a SIGTERM that comes right after the start is lost.
//!
//! The service would run for ever and dies of SIGTERM; so who is still there 2 s later has lost the signal. The delays
//! are spread evenly over the window, counted from the moment at which the program was executed.

use std::io;
use std::time::Duration;

use libc::pid_t;

use crate::bed::Scene;
use crate::bed::clock::{now, spin_until};
use crate::bed::procfs;
use crate::bed::program::{Program, signal, wait_for};
use crate::bed::table::Table;

use super::{is_sleep, sleep, turns};

/// Who has not ended this long after the signal has lost it.
const LOST: u64 = 2_000_000_000;
/// How long to wait for the end before the next one is started beside it.
const SOON: Duration = Duration::from_millis(20);
/// How many starts to make before those that did not end soon are looked at, all at once.
const BATCH: usize = 50;

/// What became of a peer's starts.
#[derive(Clone, Default)]
struct Fate {
    lost: usize,
    orphaned: usize,
}

struct Waiting {
    turn: usize,
    pid: pid_t,
    lost_at: u64,
}

pub(super) fn take(scene: &Scene<'_>) -> io::Result<Vec<Table>> {
    Ok(vec![
        window(scene, false, 3_000_000, scene.rounds(400, 50))?,
        window(scene, true, 2_000_000, scene.rounds(200, 50))?,
    ])
}

fn window(scene: &Scene<'_>, as_pid1: bool, width: u64, starts: usize) -> io::Result<Table> {
    let mut programs = Vec::new();
    for (number, peer) in scene.peers.iter().enumerate() {
        programs.push(Program::new(peer.running(&sleep(number).0))?.in_namespace(as_pid1));
    }
    let mut fates = vec![Fate::default(); programs.len()];
    let mut waiting = Vec::new();
    for start in 0..starts {
        let delay = width * start as u64 / starts as u64;
        for turn in turns(programs.len(), start) {
            let pid = programs[turn].start()?;
            spin_until(now() + delay);
            signal(pid, libc::SIGTERM)?;
            let lost_at = now() + LOST;
            if wait_for(pid, SOON)?.is_none() {
                waiting.push(Waiting { turn, pid, lost_at });
            }
        }
        if (start + 1) % BATCH == 0 || start + 1 == starts {
            settle(scene, &mut waiting, &mut fates)?;
        }
    }
    let place = if as_pid1 { ", as PID 1" } else { "" };
    let title = format!("early-stop: SIGTERM in the first {} ms{place}, {starts} starts", width / 1_000_000);
    let mut table = Table::new(title, &["", "lost", "%", "ended, but left its service"]);
    for (peer, fate) in scene.peers.iter().zip(fates) {
        let share = format!("{:.1}", fate.lost as f64 * 100.0 / starts as f64);
        table.row([peer.name.clone(), fate.lost.to_string(), share, fate.orphaned.to_string()]);
    }
    Ok(table)
}

/// Looks at those that did not end soon, and at what those that did end left.
fn settle(scene: &Scene<'_>, waiting: &mut Vec<Waiting>, fates: &mut [Fate]) -> io::Result<()> {
    for Waiting { turn, pid, lost_at } in waiting.drain(..) {
        if wait_for(pid, Duration::from_nanos(lost_at.saturating_sub(now())))?.is_none() {
            fates[turn].lost += 1;
        }
    }
    // The services of the lost are still theirs, and so not counted twice.
    for orphan in procfs::children(1) {
        if let Some(turn) = (0..fates.len()).find(|&turn| is_sleep(orphan, &sleep(turn).1)) {
            fates[turn].orphaned += 1;
        }
    }
    scene.bed.clear();
    Ok(())
}
