//! What a supervisor adds to the run of a command that ends at once.

use std::io;
use std::path::PathBuf;

use crate::bed::Scene;
use crate::bed::clock::now;
use crate::bed::peer::Peer;
use crate::bed::program::{Program, wait};
use crate::bed::table::{Ratios, Table, median, quantile};

use super::turns;

const COMMAND: &str = "/bin/true";
/// Rounds before the ones that count: they fill the page cache.
const WARM_UP: usize = 5;

/// The figures of one candidate, an entry per round: microseconds, microseconds of CPU, page faults.
#[derive(Default)]
struct Samples {
    wall: Vec<f64>,
    cpu: Vec<f64>,
    faults: Vec<f64>,
}

impl Samples {
    /// What `figure` makes of these beyond what it makes of the bare run.
    fn beyond(&self, bare: &Samples, figure: impl Fn(&Samples) -> f64) -> f64 {
        figure(self) - figure(bare)
    }
}

pub(super) fn take(scene: &Scene<'_>) -> io::Result<Vec<Table>> {
    let rounds = scene.rounds(400, 80);
    let command = [PathBuf::from(COMMAND).into_os_string()];
    let mut programs = vec![("bare".to_owned(), Program::new(command.to_vec())?)];
    let peers = with_and_without(&scene.peers);
    for peer in &peers {
        programs.push((peer.name.clone(), Program::new(peer.running(&command))?));
    }
    let mut samples: Vec<Samples> = programs.iter().map(|_| Samples::default()).collect();
    for round in 0..WARM_UP + rounds {
        for turn in turns(programs.len(), round) {
            let (name, program) = &mut programs[turn];
            let begin = now();
            let ended = wait(program.start()?)?;
            let end = now();
            if !ended.well() {
                return Err(io::Error::other(format!("{name} gave {}", ended.how())));
            }
            if round >= WARM_UP {
                let samples = &mut samples[turn];
                samples.wall.push((end - begin) as f64 / 1e3);
                samples.cpu.push(ended.cpu);
                samples.faults.push(ended.faults);
            }
        }
    }
    Ok(vec![tell(&peers, rounds, &samples)])
}

/// What of a start is the guard's, and what is the cgroup's.
fn with_and_without(peers: &[Peer]) -> Vec<Peer> {
    let ours = peers.iter().filter(|peer| peer.ours).cloned();
    let parts = ours.flat_map(|peer| {
        [
            peer.clone().called("lineage", &["--containment", "lineage", "--"]),
            peer.called("lineage, no guard", &["--guard", "off", "--containment", "lineage", "--"]),
        ]
    });
    peers.iter().cloned().chain(parts).collect()
}

fn tell(peers: &[Peer], rounds: usize, samples: &[Samples]) -> Table {
    let title = format!("start: X -- {COMMAND}, {rounds} rounds, turn by turn; ratio to the best peer");
    let head = ["", "µs", "added", "ratio", "added, quick quarter", "ratio", "CPU µs added", "ratio", "faults added"];
    let mut table = Table::new(title, &head);
    let [bare, rest @ ..] = samples else {
        return table;
    };
    let figures: [fn(&Samples) -> f64; 3] =
        [|of| median(&of.wall), |of| quantile(&of.wall, 0.25), |of| median(&of.cpu)];
    let ours = peers.iter().map(|peer| peer.ours);
    let ratios = figures.map(|figure| Ratios::to_best(rest.iter().map(|of| of.beyond(bare, figure)).zip(ours.clone())));
    table.row(["bare".to_owned(), format!("{:.0}", median(&bare.wall))]);
    for (peer, of) in peers.iter().zip(rest) {
        let mut row = vec![peer.name.clone(), format!("{:.0}", median(&of.wall))];
        for (figure, ratio) in figures.iter().zip(&ratios) {
            let added = of.beyond(bare, figure);
            row.extend([format!("{added:.0}"), ratio.of(added)]);
        }
        row.push(format!("{:.0}", of.beyond(bare, |of| median(&of.faults))));
        table.row(row);
    }
    table
}
