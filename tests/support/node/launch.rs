//! From fork to exec of the program under test: namespaces, descriptors, limits, signals, user, filter, in this order.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use crate::signals;
use crate::sys::check;
use crate::wire::{Launch, Space, Tmpfs};

/// Forks; the child becomes the program. `failed` is closed by the exec, or gets the reason why there was none.
pub(crate) fn fork(launch: &Launch, fds: &[OwnedFd], failed: &OwnedFd) -> i32 {
    let namespace = if launch.space == Space::Ours { 0 } else { libc::CLONE_NEWPID };
    let flags = (namespace | libc::SIGCHLD).cast_unsigned();
    // SAFETY: the warden has one thread; without CLONE_VM the child has a copy of everything.
    let pid = unsafe { libc::syscall(libc::SYS_clone, libc::c_ulong::from(flags), 0, 0, 0, 0) };
    if pid == 0 {
        let what = become_program(launch, fds).map_or_else(|e| e, |()| "exec".to_owned());
        let text = format!("{what}: {}", io::Error::last_os_error());
        // SAFETY: the buffer is as long as said.
        unsafe { libc::write(failed.as_raw_fd(), text.as_ptr().cast(), text.len()) };
        signals::exit(96);
    }
    i32::try_from(pid).unwrap()
}

/// Comes back only when something failed; errno is still its.
fn become_program(launch: &Launch, fds: &[OwnedFd]) -> Result<(), String> {
    let fail = |what: &'static str| move |_| what.to_owned();
    let high = move_up(fds).map_err(fail("dup"))?;
    if launch.space != Space::Ours || !launch.tmpfs.is_empty() {
        mount(launch).map_err(fail("mount"))?;
    }
    for fd in 0..3 {
        // SAFETY: the warden's; the program's come next.
        unsafe { libc::close(fd) };
    }
    for (from, to) in high.iter().zip(&launch.fds) {
        // SAFETY: no memory is involved.
        check(unsafe { libc::dup2(*from, *to) }).map_err(fail("dup2"))?;
    }
    take_session(launch).map_err(fail("session"))?;
    for (resource, soft, hard) in &launch.rlimits {
        let limit = libc::rlimit { rlim_cur: *soft, rlim_max: *hard };
        // SAFETY: the limit is ours.
        check(unsafe { libc::setrlimit(*resource, &raw const limit) }).map_err(fail("setrlimit"))?;
    }
    if let Some(umask) = launch.umask {
        // SAFETY: no memory is involved.
        unsafe { libc::umask(umask) };
    }
    let cwd = CString::new(launch.cwd.as_str()).unwrap();
    // SAFETY: a valid C string.
    check(unsafe { libc::chdir(cwd.as_ptr()) }).map_err(fail("chdir"))?;
    signals::all_default();
    launch.ignored.iter().for_each(|signal| signals::ignore(*signal));
    signals::block(&launch.blocked, libc::SIG_SETMASK);
    change_user(launch).map_err(fail("setuid"))?;
    if !launch.seccomp.is_empty() {
        filter(launch).map_err(fail("seccomp"))?;
    }
    exec(launch);
    Ok(())
}

fn move_up(fds: &[OwnedFd]) -> io::Result<Vec<i32>> {
    // SAFETY: no memory is involved.
    fds.iter().map(|fd| check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 500) })).collect()
}

/// A session of its own; at a terminal only a group, in the foreground, as a shell does it.
fn take_session(launch: &Launch) -> io::Result<()> {
    // SAFETY: no memory is involved.
    unsafe {
        let Some(terminal) = launch.terminal else {
            return check(libc::setsid()).map(drop);
        };
        check(libc::setpgid(0, 0))?;
        signals::ignore(libc::SIGTTOU);
        check(libc::tcsetpgrp(terminal, libc::getpid())).map(drop)
    }
}

fn mount(launch: &Launch) -> io::Result<()> {
    // SAFETY: no memory is involved.
    unsafe {
        check(libc::unshare(libc::CLONE_NEWNS))?;
        // The namespace must not outlive a warden that was killed.
        if launch.space != Space::Ours {
            check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))?;
        }
    }
    mount_at("none", "/", "", libc::MS_REC | libc::MS_PRIVATE, "")?;
    match launch.space {
        Space::PidOne => mount_at("proc", "/proc", "proc", 0, "")?,
        Space::PidOneWithoutProc => {
            // SAFETY: a valid C string.
            check(unsafe { libc::umount2(c"/proc".as_ptr(), libc::MNT_DETACH) })?;
        }
        Space::Ours | Space::PidOneWithOuterProc => {}
    }
    launch.tmpfs.iter().try_for_each(mount_tmpfs)
}

fn mount_tmpfs(tmpfs: &Tmpfs) -> io::Result<()> {
    mount_at("tmpfs", &tmpfs.path, "tmpfs", 0, "size=64k,mode=0777")?;
    if tmpfs.full {
        let filler = crate::sys::open(&format!("{}/filler", tmpfs.path), libc::O_WRONLY | libc::O_CREAT)?;
        let mut file = std::fs::File::from(filler);
        while io::Write::write(&mut file, &[b'x'; 512]).is_ok() {}
    }
    Ok(())
}

fn mount_at(source: &str, target: &str, kind: &str, flags: libc::c_ulong, data: &str) -> io::Result<()> {
    let [source, target, kind, data] = [source, target, kind, data].map(|text| CString::new(text).unwrap());
    // SAFETY: valid C strings.
    check(unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, data.as_ptr().cast()) })
        .map(drop)
}

fn change_user(launch: &Launch) -> io::Result<()> {
    // SAFETY: no memory is involved.
    unsafe {
        if launch.uid.is_some() || launch.gid.is_some() {
            check(libc::setgroups(0, std::ptr::null()))?;
        }
        if let Some(gid) = launch.gid {
            check(libc::setgid(gid))?;
        }
        if let Some(uid) = launch.uid {
            check(libc::setuid(uid))?;
        }
    }
    Ok(())
}

fn filter(launch: &Launch) -> io::Result<()> {
    let mut ops: Vec<libc::sock_filter> =
        launch.seccomp.iter().map(|op| libc::sock_filter { code: op.code, jt: op.jt, jf: op.jf, k: op.k }).collect();
    let len = u16::try_from(ops.len()).map_err(io::Error::other)?;
    let program = libc::sock_fprog { len, filter: ops.as_mut_ptr() };
    // SAFETY: the program outlives the call, the kernel copies it.
    unsafe {
        if libc::geteuid() != 0 {
            check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
        }
        check(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)).map(drop)
    }
}

fn exec(launch: &Launch) {
    let strings =
        |list: &[String]| -> Vec<CString> { list.iter().map(|a| CString::new(a.as_str()).unwrap()).collect() };
    let program = CString::new(launch.argv[0].as_str()).unwrap();
    let mut argv = strings(&launch.argv);
    if let Some(argv0) = &launch.argv0 {
        argv[0] = CString::new(argv0.as_str()).unwrap();
    }
    let env: Vec<String> = launch.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let env = strings(&env);
    let pointers = |list: &[CString]| -> Vec<_> {
        list.iter().map(|a| a.as_ptr()).chain(std::iter::once(std::ptr::null())).collect()
    };
    // SAFETY: null-terminated arrays of valid C strings.
    unsafe { libc::execvpe(program.as_ptr(), pointers(&argv).as_ptr(), pointers(&env).as_ptr()) };
}

/// Starts a command in the namespaces of `program`, from outside, as `nsenter` does. It becomes our child.
pub(crate) fn enter(program: i32, argv: &[String], env: &[(String, String)]) -> io::Result<i32> {
    let target = crate::sys::pidfd_open(program)?;
    let (read, write) = crate::sys::pipe()?;
    // SAFETY: the warden has one thread.
    let between = unsafe { libc::fork() };
    if between == 0 {
        // SAFETY: no memory is involved.
        let pid = unsafe {
            let entered = libc::setns(target.as_raw_fd(), libc::CLONE_NEWPID | libc::CLONE_NEWNS) == 0;
            if entered { libc::fork() } else { -1 }
        };
        if pid == 0 {
            let launch = Launch { argv: argv.to_vec(), env: env.to_vec(), cwd: "/".to_owned(), ..Launch::default() };
            let _ = become_program(&launch, &[]);
            signals::exit(96);
        }
        // SAFETY: the buffer is as long as said.
        unsafe { libc::write(write.as_raw_fd(), pid.to_ne_bytes().as_ptr().cast(), 4) };
        signals::exit(0);
    }
    drop(write);
    let mut bytes = [0; 4];
    crate::sys::read(read.as_raw_fd(), &mut bytes)?;
    // SAFETY: no status is asked for.
    unsafe { libc::waitpid(between, std::ptr::null_mut(), 0) };
    check(i32::from_ne_bytes(bytes))
}
