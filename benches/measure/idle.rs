//! What a supervisor costs while its service runs and nothing happens.

use std::io;
use std::thread;
use std::time::Duration;

use crate::bed::Scene;
use crate::bed::peer::Peer;
use crate::bed::procfs;
use crate::bed::table::{Ratios, Table, median};

use super::start_sleep;

/// Until then all that belongs to the start is over.
const SETTLED: Duration = Duration::from_secs(1);

/// Memory of the processes that execute the peer.
pub(super) fn memory(scene: &Scene<'_>) -> io::Result<Vec<Table>> {
    let rounds = scene.rounds(5, 1);
    let mut samples: Vec<[Vec<f64>; 3]> = scene.peers.iter().map(|_| Default::default()).collect();
    for _ in 0..rounds {
        start_all(scene)?;
        for (peer, [processes, pss, dirty]) in scene.peers.iter().zip(&mut samples) {
            let pids = procfs::running(&peer.program);
            let sum = |of: fn(i32) -> u64| pids.iter().map(|&pid| of(pid)).sum::<u64>() as f64;
            processes.push(pids.len() as f64);
            pss.push(sum(procfs::pss));
            dirty.push(sum(procfs::private_dirty));
        }
        scene.bed.clear();
    }
    let title = format!("memory: X -- sleep, idle, median of {rounds}; ratio to the best peer");
    let head = ["", "processes", "PSS kB", "ratio", "private dirty kB", "ratio"];
    let mut table = Table::new(title, &head);
    let ratios = [1, 2].map(|at: usize| {
        Ratios::to_best(scene.peers.iter().zip(&samples).map(|(peer, of)| (median(&of[at]), peer.ours)))
    });
    for (peer, of) in scene.peers.iter().zip(&samples) {
        let mut row = vec![peer.name.clone(), format!("{:.0}", median(&of[0]))];
        for (values, ratio) in of[1..].iter().zip(&ratios) {
            row.extend([format!("{:.0}", median(values)), ratio.of(median(values))]);
        }
        table.row(row);
    }
    Ok(vec![table])
}

/// Context switches and CPU of the same processes.
pub(super) fn wake_ups(scene: &Scene<'_>) -> io::Result<Vec<Table>> {
    let seconds = if scene.quick { 3 } else { 10 };
    start_all(scene)?;
    let before: Vec<_> = scene.peers.iter().map(activity).collect();
    thread::sleep(Duration::from_secs(seconds));
    let after: Vec<_> = scene.peers.iter().map(activity).collect();
    scene.bed.clear();
    let head = ["", "threads", "context switches", "CPU µs"];
    let mut table = Table::new(format!("idle: X -- sleep, {seconds} s"), &head);
    for ((peer, before), after) in scene.peers.iter().zip(before).zip(after) {
        let switches = (after.switches - before.switches).to_string();
        let time = format!("{:.0}", (after.time - before.time) as f64 / 1e3);
        table.row([peer.name.clone(), after.threads.to_string(), switches, time]);
    }
    Ok(vec![table])
}

/// One of each at the same time.
fn start_all(scene: &Scene<'_>) -> io::Result<()> {
    for (number, peer) in scene.peers.iter().enumerate() {
        start_sleep(peer, number)?;
    }
    thread::sleep(SETTLED);
    Ok(())
}

struct Activity {
    threads: usize,
    switches: u64,
    time: u64,
}

fn activity(peer: &Peer) -> Activity {
    let pids = procfs::running(&peer.program);
    Activity {
        threads: pids.iter().map(|&pid| procfs::threads(pid).len()).sum(),
        switches: pids.iter().map(|&pid| procfs::switches(pid)).sum(),
        time: pids.iter().map(|&pid| procfs::run_time(pid)).sum(),
    }
}
