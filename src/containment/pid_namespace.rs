//! Containment by a pid namespace: the kernel itself ends all in it with its PID 1, which is the supervisor.
//!
//! So nothing is left also when guard and supervisor are killed at the same instant. It takes CAP_SYS_ADMIN, or a user
//! namespace, in which the service's user and group stay what they are and no other has a name. The service sees the
//! processes of the namespace alone, in a `/proc` of its own; what it mounts is not seen outside.

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use std::{fmt, fs, io};

/// Why there is no namespace.
#[derive(Debug)]
pub struct Unavailable {
    what: &'static str,
    why: io::Error,
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, crate::log::reason(&self.why))
    }
}

fn unavailable<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Unavailable {
    move |why| Unavailable { what, why: why.into() }
}

/// Makes a pid namespace. We stay outside; the next child is its PID 1.
///
/// # Errors
/// When we may not, neither as we are nor in a user namespace of our own.
pub fn make() -> Result<(), Unavailable> {
    if unshare(CloneFlags::CLONE_NEWPID).is_ok() {
        return Ok(());
    }
    let (user, group) = (nix::unistd::geteuid(), nix::unistd::getegid());
    let both = CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWPID;
    unshare(both).map_err(unavailable("a pid namespace takes root, or a user namespace, which is refused"))?;
    let map = |file: &str, text: String| fs::write(format!("/proc/self/{file}"), text);
    // Without a privilege outside, the groups have to be fixed before a group can be mapped (user_namespaces(7)).
    map("setgroups", "deny".to_owned())
        .and_then(|()| map("uid_map", format!("{user} {user} 1")))
        .and_then(|()| map("gid_map", format!("{group} {group} 1")))
        .map_err(unavailable("cannot map the user into the user namespace"))
}

/// Makes the new PID 1 at home: a `/proc` of the namespace's own, in a mount namespace that gets what is mounted outside
/// and gives nothing back.
///
/// # Errors
/// When we may not; in a container whose `/proc` is covered in parts the kernel refuses a new one.
pub fn settle() -> Result<(), Unavailable> {
    unshare(CloneFlags::CLONE_NEWNS).map_err(unavailable("cannot make a mount namespace"))?;
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_SLAVE, none)
        .map_err(unavailable("cannot keep what is mounted here from others"))?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("proc"), "/proc", Some("proc"), flags, none)
        .map_err(unavailable("cannot mount a /proc of the namespace's own"))
}
