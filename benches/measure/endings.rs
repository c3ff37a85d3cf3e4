//! How long it takes to end what a service leaves, and what is left after all.
//!
//! The peers leave all of it: their rows show what they are not made for.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use crate::bed::clock::{now, seconds};
use crate::bed::peer::Peer;
use crate::bed::program::{Account, Program, signal, wait_for};
use crate::bed::role;
use crate::bed::table::{Table, median};
use crate::bed::wire::{self, Word};
use crate::bed::{Scene, mount};

use super::turns;

/// How long the service may need until its tree stands.
const READY: Duration = Duration::from_secs(60);
/// How long the supervisor may need to end it.
const LIMIT: Duration = Duration::from_secs(40);

/// What ends the leader.
#[derive(Clone, Copy)]
enum Leader {
    /// SIGKILL, as soon as the tree stands.
    IsKilled,
    /// It ends by itself when told to.
    IsTold,
    /// It ends by itself.
    Ends,
}

/// A service, and how it comes to its end.
struct Service<'a> {
    role: &'a [&'a str],
    leader: Leader,
    account: Option<Account>,
}

/// What became of the tree in one round.
struct Ending {
    /// From the end of the leader until the supervisor is gone; none if it did not come to that.
    seconds: Option<f64>,
    how: String,
    left: usize,
}

pub(super) fn mass(scene: &Scene<'_>) -> io::Result<Vec<Table>> {
    let service = Service { role: &["mass", "300", "4"], leader: Leader::IsKilled, account: None };
    let what = "mass: 1200 orphans in 300 sessions, which die of SIGTERM; SIGKILL of the leader until X is gone";
    Ok(vec![side_by_side(scene, what, &service, scene.rounds(5, 1))?])
}

pub(super) fn chains(scene: &Scene<'_>) -> io::Result<Vec<Table>> {
    let kept = Service { role: &["chains", "64", "0"], leader: Leader::IsTold, account: None };
    let own = Service { role: &["chains", "64", "1"], ..kept };
    let rounds = scene.rounds(5, 1);
    Ok(vec![
        side_by_side(
            scene,
            "chains: 64 fork-and-exit chains in the service's session; exit of the leader until X is gone",
            &kept,
            rounds,
        )?,
        side_by_side(scene, "chains: 64 fork-and-exit chains, each link in a session of its own", &own, rounds)?,
    ])
}

pub(super) fn bomb(scene: &Scene<'_>) -> io::Result<Vec<Table>> {
    let account = Account { uid: 64123, processes: if scene.quick { 300 } else { 1500 } };
    let scene = &for_everybody(scene)?;
    let service = Service { role: &["bomb"], leader: Leader::Ends, account: Some(account) };
    let what = format!(
        "bomb: each process forks for ever and has a session of its own, {} processes of an unprivileged user; \
         exit of the leader until X is gone",
        account.processes
    );
    Ok(vec![side_by_side(scene, &what, &service, scene.rounds(3, 1))?])
}

fn side_by_side(scene: &Scene<'_>, what: &str, service: &Service<'_>, rounds: usize) -> io::Result<Table> {
    let mut endings: Vec<Vec<Ending>> = scene.peers.iter().map(|_| Vec::new()).collect();
    let preferred = scene.bed.prefer_itself();
    for round in 0..rounds {
        for turn in turns(scene.peers.len(), round) {
            let peer = &scene.peers[turn];
            // What they leave does not vary, and the longest of them take the longest to leave it.
            if round > 0 && !peer.ours {
                continue;
            }
            let ending = once(scene, peer, service);
            scene.bed.clear();
            endings[turn].push(ending?);
        }
    }
    let head = ["", "median s", "longest s", "not gone", "most left", "ended with"];
    let mut table = Table::new(format!("{what}; {rounds} times, the peers once"), &head);
    for (peer, endings) in scene.peers.iter().zip(&endings) {
        let mut times: Vec<f64> = endings.iter().filter_map(|ending| ending.seconds).collect();
        let late = endings.len() - times.len();
        times.resize(endings.len(), f64::INFINITY);
        let told = |time: f64| {
            if time.is_finite() { format!("{time:.3}") } else { "-".to_owned() }
        };
        let mut ways: Vec<&str> = endings.iter().map(|ending| ending.how.as_str()).collect();
        ways.sort_unstable();
        ways.dedup();
        table.row([
            peer.name.clone(),
            told(median(&times)),
            told(times.iter().copied().fold(0.0, f64::max)),
            late.to_string(),
            endings.iter().map(|ending| ending.left).max().unwrap_or(0).to_string(),
            ways.join(", "),
        ]);
    }
    table.remark(format!("not gone: within {} s; left: processes alive when X was gone", LIMIT.as_secs()));
    if let Err(error) = preferred {
        table.remark(format!("the measuring process competes with the tree it measures: {error}"));
    }
    Ok(table)
}

fn once(scene: &Scene<'_>, peer: &Peer, service: &Service<'_>) -> io::Result<Ending> {
    let words = service.role.iter().map(OsString::from);
    let command: Vec<OsString> = [scene.itself.clone().into(), role::FLAG.into()].into_iter().chain(words).collect();
    let (mut wire, theirs) = wire::pair()?;
    let mut program = Program::new(peer.running(&command))?.with_wire(&theirs).run_by(service.account);
    let pid = program.start()?;
    drop(theirs);
    let blame = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", peer.name));
    let leader = wire.word(READY).map_err(blame)?;
    let Word { time: begin, .. } = match service.leader {
        Leader::IsKilled => {
            let word = Word { time: now(), ..leader };
            signal(leader.pid, libc::SIGKILL)?;
            word
        }
        Leader::IsTold => {
            wire.go()?;
            wire.word(READY).map_err(blame)?
        }
        Leader::Ends => leader,
    };
    let ended = wait_for(pid, LIMIT)?;
    let end = now();
    Ok(Ending {
        seconds: ended.is_some().then(|| seconds(begin, end)),
        how: ended.map_or("-".to_owned(), |ended| ended.how()),
        left: scene.bed.others(),
    })
}

/// The same scene with binaries that any user may execute: those of a build often lie in somebody's home.
fn for_everybody<'a>(scene: &Scene<'a>) -> io::Result<Scene<'a>> {
    let place = Path::new("/tmp");
    let publish = |name: &str, image: Vec<u8>| {
        let path = place.join(name);
        fs::write(&path, image)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        Ok::<_, io::Error>(path)
    };
    // Read before the mount, which may hide them.
    let itself = fs::read(&scene.itself)?;
    let peers: Vec<(Peer, Vec<u8>)> =
        scene.peers.iter().map(|peer| Ok((peer.clone(), fs::read(&peer.program)?))).collect::<io::Result<_>>()?;
    // Of this namespace only, and gone with it.
    mount(c"tmpfs", c"/tmp", c"tmpfs", 0)?;
    fs::set_permissions(place, fs::Permissions::from_mode(0o755))?;
    let peers = peers
        .into_iter()
        .map(|(peer, image)| {
            let place = publish(&peer.name, image)?;
            Ok(peer.moved_to(place))
        })
        .collect::<io::Result<_>>()?;
    Ok(Scene { bed: scene.bed, peers, quick: scene.quick, itself: publish("peers", itself)? })
}
