//! How long a stop takes when the service dies of SIGTERM and leaves nothing behind.

use std::io;
use std::thread;
use std::time::Duration;

use crate::bed::Scene;
use crate::bed::clock::{now, seconds};
use crate::bed::program::{signal, wait};
use crate::bed::table::{Ratios, Table, median, quantile};

use super::{start_sleep, turns};

/// From the exec of the service until its supervisor waits for what comes.
const SETTLED: Duration = Duration::from_millis(20);

pub(super) fn take(scene: &Scene<'_>) -> io::Result<Vec<Table>> {
    let stops = scene.rounds(50, 15);
    let mut samples = vec![Vec::new(); scene.peers.len()];
    for round in 0..stops {
        for turn in turns(scene.peers.len(), round) {
            let pid = start_sleep(&scene.peers[turn], turn)?;
            thread::sleep(SETTLED);
            let begin = now();
            signal(pid, libc::SIGTERM)?;
            wait(pid)?;
            samples[turn].push(seconds(begin, now()) * 1e3);
        }
        scene.bed.clear();
    }
    let title = format!("empty-stop: SIGTERM to exit of X -- sleep, {stops} stops; ratio to the best peer");
    let mut table = Table::new(title, &["", "median ms", "ratio", "longest ms"]);
    let ratios = Ratios::to_best(scene.peers.iter().zip(&samples).map(|(peer, of)| (median(of), peer.ours)));
    for (peer, of) in scene.peers.iter().zip(&samples) {
        let longest = format!("{:.2}", quantile(of, 1.0));
        table.row([peer.name.clone(), format!("{:.2}", median(of)), ratios.of(median(of)), longest]);
    }
    Ok(vec![table])
}
