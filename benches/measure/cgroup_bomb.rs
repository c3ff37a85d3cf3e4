//! A wide fork bomb in a cgroup: what `supervise` takes to end and reap it, beside the least that can be done, one write to
//! `cgroup.kill` until the kernel says `populated 0`, and reaping.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::bed::Scene;
use crate::bed::clock::{now, seconds};
use crate::bed::peer::Peer;
use crate::bed::program::{Program, wait_for};
use crate::bed::role;
use crate::bed::table::{Table, median};
use crate::bed::wire;

/// How long the bomb may need until it is as wide as it may be.
const READY: Duration = Duration::from_secs(120);
/// How long it may take to end it.
const LIMIT: Duration = Duration::from_secs(70);

const USER: &str = "64124";

pub(super) fn take(scene: &Scene<'_>) -> io::Result<Vec<Table>> {
    let processes = if scene.quick { "300" } else { "2000" };
    let rounds = scene.rounds(3, 1);
    let title = format!(
        "cgroup-bomb: each process forks for ever and has a session of its own, {processes} processes of an unprivileged \
         user in a cgroup, ended by root; {rounds} times, turn by turn"
    );
    let mut table = Table::new(title, &["", "median s", "ratio", "most left"]);
    let place = match own_cgroup() {
        Ok(place) => place,
        Err(why) => {
            table.remark(format!("not measured: {why}"));
            return Ok(vec![table]);
        }
    };
    let ours: Vec<Peer> = scene.peers.iter().filter(|peer| peer.ours).cloned().collect();
    let ours: Vec<Peer> =
        ours.into_iter().map(|peer| peer.called("--containment cgroup", &["--containment", "cgroup", "--"])).collect();
    let command = ["bomb-as", USER, processes].map(OsString::from);
    let command: Vec<OsString> = [scene.itself.clone().into(), role::FLAG.into()].into_iter().chain(command).collect();
    let mut times: Vec<Vec<f64>> = vec![vec![]; ours.len() + 1];
    let mut left = vec![0; ours.len() + 1];
    let preferred = scene.bed.prefer_itself();
    for _ in 0..rounds {
        for turn in 0..=ours.len() {
            let took = match ours.get(turn) {
                Some(peer) => supervised(peer, &command),
                None => bare(scene, &place, &command),
            };
            left[turn] = left[turn].max(scene.bed.others());
            scene.bed.clear();
            times[turn].push(took?);
        }
    }
    let bare = median(&times[ours.len()]);
    let names = ours.iter().map(|peer| peer.name.clone()).chain(["bare cgroup.kill".to_owned()]);
    for ((name, times), left) in names.zip(&times).zip(left) {
        let time = median(times);
        table.row([name, format!("{time:.3}"), format!("{:.2}", time / bare), left.to_string()]);
    }
    if let Err(error) = preferred {
        table.remark(format!("the measuring process competes with the tree it measures: {error}"));
    }
    Ok(vec![table])
}

/// From the end of the leader until X is gone.
fn supervised(peer: &Peer, command: &[OsString]) -> io::Result<f64> {
    let (mut wire, theirs) = wire::pair()?;
    let pid = Program::new(peer.running(command))?.with_wire(&theirs).start()?;
    drop(theirs);
    let begin = wire.word(READY)?.time;
    wait_for(pid, LIMIT)?.ok_or_else(|| io::Error::other(format!("{} did not end in time", peer.name)))?;
    Ok(seconds(begin, now()))
}

/// From the end of the leader until the cgroup is empty and everybody reaped; orphans fall to us.
fn bare(scene: &Scene<'_>, place: &Path, command: &[OsString]) -> io::Result<f64> {
    let cgroup = place.join(format!("peers-{}", now()));
    fs::create_dir(&cgroup)?;
    let (mut wire, theirs) = wire::pair()?;
    let mut program = Program::new(command.to_vec())?.with_wire(&theirs);
    // What is made while we are in it is born in it.
    fs::write(cgroup.join("cgroup.procs"), "0")?;
    let started = program.start();
    fs::write(place.join("cgroup.procs"), "0")?;
    started?;
    drop(theirs);
    let begin = wire.word(READY)?.time;
    let mut events = fs::File::open(cgroup.join("cgroup.events"))?;
    let until = now() + 60_000_000_000;
    loop {
        fs::write(cgroup.join("cgroup.kill"), "1")?;
        let mut text = String::new();
        events.rewind()?;
        events.read_to_string(&mut text)?;
        if text.contains("populated 0") || now() > until {
            break;
        }
        std::thread::yield_now();
    }
    scene.bed.clear();
    let took = seconds(begin, now());
    fs::remove_dir(&cgroup)?;
    Ok(took)
}

/// The directory of our own cgroup, if cgroups can be made below it.
fn own_cgroup() -> io::Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let mount = mounts.lines().find(|line| line.contains(" - cgroup2 "));
    let point = mount.and_then(|line| line.split(' ').nth(4)).ok_or(io::Error::other("cgroup2 is not mounted"))?;
    let cgroups = fs::read_to_string("/proc/self/cgroup")?;
    let own = cgroups.lines().find_map(|line| line.strip_prefix("0::"));
    let own = own.ok_or(io::Error::other("we are in no cgroup of version 2"))?;
    let place = PathBuf::from(format!("{point}{own}"));
    let probe = place.join(format!("peers-{}", now()));
    fs::create_dir(&probe).and_then(|()| fs::remove_dir(&probe))?;
    Ok(place)
}
