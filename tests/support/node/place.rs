//! What a node is before it lives: its names, session, group, user, and how it is made.

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering::SeqCst};

use crate::signals::exit;
use crate::spec::{Birth, Spec};
use crate::sys;

static TITLE: AtomicPtr<c_char> = AtomicPtr::new(std::ptr::null_mut());
static ROOM: AtomicUsize = AtomicUsize::new(0);

/// Remembers where the command line is, for [`set_names`].
pub(crate) fn keep_title_area(argv: *const *mut c_char, args: &[String]) {
    // SAFETY: the caller's argv has at least one string.
    TITLE.store(unsafe { *argv }, SeqCst);
    ROOM.store(args.iter().map(|a| a.len() + 1).sum(), SeqCst);
}

/// `node NAME` as the command line, and the name (or the comm asked for) as the comm.
///
/// All nodes are forks of one process: without this nobody could tell them apart in a report.
pub(crate) fn set_names(spec: &Spec, name: &str) {
    let comm = CString::new(spec.comm.clone().unwrap_or_else(|| name.as_bytes().to_vec())).unwrap();
    // SAFETY: a valid C string; the kernel cuts it.
    unsafe { libc::prctl(libc::PR_SET_NAME, comm.as_ptr()) };
    let (title, room) = (TITLE.load(SeqCst), ROOM.load(SeqCst));
    let text = format!("node {name}\0");
    if title.is_null() || room < 8 {
        return;
    }
    let cut = text.len().min(room - 1);
    // SAFETY: the kernel laid the arguments out in one piece of `room` bytes, which nobody else reads any more. A last
    // byte that is not NUL makes the kernel end the command line at the first NUL.
    unsafe {
        std::ptr::write_bytes(title, b'.', room);
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), title, cut);
    }
}

/// Session, group, subreaper, user: in the order in which each is still allowed.
pub(crate) fn set_place(spec: &Spec) {
    // SAFETY: no memory is involved.
    unsafe {
        if spec.setsid && libc::getsid(0) != libc::getpid() && libc::setsid() < 0 {
            complain("setsid");
        }
        if spec.own_group && libc::setpgid(0, 0) < 0 {
            complain("setpgid");
        }
        if spec.subreaper {
            libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1);
        }
        if let Some(uid) = spec.uid
            && (libc::setgroups(0, std::ptr::null()) < 0 || libc::setgid(uid) < 0 || libc::setuid(uid) < 0)
        {
            complain("setuid");
        }
        for fd in &spec.closes {
            libc::close(*fd);
        }
    }
}

pub(crate) fn complain(what: &str) -> ! {
    eprintln!("node: {what}: {}", std::io::Error::last_os_error());
    exit(98)
}

/// Makes a process that does `live`, which never returns. The pid of our new child; 0 when it is not ours.
pub(crate) fn make(birth: Birth, live: &mut dyn FnMut()) -> i32 {
    let pid = match birth {
        Birth::Fork => fork_like(libc::SIGCHLD.cast_unsigned()),
        Birth::CloneSignal(signal) => fork_like(signal.cast_unsigned()),
        Birth::CloneParent => fork_like((libc::CLONE_PARENT | libc::SIGCHLD).cast_unsigned()),
        Birth::Clone3 => clone3(),
        Birth::Vfork => return vfork(live),
        Birth::Orphan => return twice(false, live),
        Birth::Daemon => return twice(true, live),
    };
    match pid {
        0 => {
            live();
            exit(97)
        }
        ..0 => complain("clone"),
        _ if birth == Birth::CloneParent => 0,
        _ => pid,
    }
}

/// `fork`, or the same by another system call. libc's own fork where it will do, since it also mends libc's state.
fn fork_like(flags: u32) -> i32 {
    // SAFETY: this process has one thread; without CLONE_VM the child has a copy of everything.
    patiently(|| unsafe {
        if flags == libc::SIGCHLD.cast_unsigned() {
            return libc::fork();
        }
        i32::try_from(libc::syscall(libc::SYS_clone, libc::c_ulong::from(flags), 0, 0, 0, 0)).unwrap()
    })
}

/// Again while the machine is out of pids: another test's chains may have them all for a moment.
pub(crate) fn patiently(mut fork: impl FnMut() -> i32) -> i32 {
    let mut pid = 0;
    sys::spin(std::time::Duration::from_secs(20), || {
        pid = fork();
        pid >= 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::EAGAIN)
    });
    pid
}

fn clone3() -> i32 {
    // SAFETY: all zero is a valid clone_args; without CLONE_VM this is a fork.
    patiently(|| unsafe {
        let mut args: libc::clone_args = std::mem::zeroed();
        args.exit_signal = u64::from(libc::SIGCHLD.cast_unsigned());
        i32::try_from(libc::syscall(libc::SYS_clone3, &raw mut args, size_of::<libc::clone_args>())).unwrap()
    })
}

/// What vfork does, on a stack of its own: Rust does not know functions that return twice.
fn vfork(live: &mut dyn FnMut()) -> i32 {
    extern "C" fn entry(arg: *mut c_void) -> c_int {
        // SAFETY: the reference below, whose owner is suspended until we end.
        unsafe { (*arg.cast::<&mut dyn FnMut()>())() };
        exit(97)
    }
    let mut live = live;
    let mut stack = vec![0_u8; 1 << 20];
    let top = (stack.as_mut_ptr() as usize + stack.len()) & !15;
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: the stack outlives the child, as we are suspended until it ends.
    unsafe { libc::clone(entry, top as *mut c_void, flags, (&raw mut live).cast()) }
}

fn twice(setsid: bool, live: &mut dyn FnMut()) -> i32 {
    let between = fork_like(libc::SIGCHLD.cast_unsigned());
    if between == 0 {
        if setsid {
            // SAFETY: no memory is involved.
            unsafe { libc::setsid() };
        }
        // SAFETY: no memory is involved.
        let parent = unsafe { libc::getpid() };
        if fork_like(libc::SIGCHLD.cast_unsigned()) == 0 {
            // Its parent is the subreaper from the first word it says.
            // SAFETY: no memory is involved.
            sys::spin(std::time::Duration::from_secs(30), || unsafe { libc::getppid() } != parent);
            live();
            exit(97)
        }
        exit(0);
    }
    // SAFETY: no status is asked for.
    unsafe { libc::waitpid(between, std::ptr::null_mut(), 0) };
    0
}
