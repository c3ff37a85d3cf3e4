//! What this process may do (capabilities(7)), asked of the kernel: a user id says too little.

use std::io;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capability {
    /// To signal the processes of other users.
    Kill,
}

/// _LINUX_CAPABILITY_VERSION_3 (linux/capability.h).
const VERSION: u32 = 0x2008_0522;

/// CAP_KILL (linux/capability.h).
const CAP_KILL: u32 = 5;

/// As the kernel has it; the set is in two halves.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Half {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Whether it is among our effective ones.
///
/// # Errors
/// When a filter refuses the call.
pub fn has(capability: Capability) -> io::Result<bool> {
    let header = [VERSION, 0];
    let mut halves = [Half::default(); 2];
    // SAFETY: the header is two numbers, of which 0 stands for ourselves; at this version two halves are filled.
    if unsafe { libc::syscall(libc::SYS_capget, header.as_ptr(), halves.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let bit = match capability {
        Capability::Kill => CAP_KILL,
    };
    Ok(halves[0].effective & (1 << bit) != 0)
}
