//! Making the main process: everything that allocates happens here, before the fork.

use super::signals::Inherited;
use super::terminal::Placement;
use super::{Pid, child, marks, oom};
use crate::containment::cgroup::Cgroup;
use crate::log::reason;
use crate::report::mask;
use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::{env, fmt, ptr};
use tracing::info;

/// Where execvp looks when there is no PATH (confstr(3), _CS_PATH).
const DEFAULT_PATH: &str = "/bin:/usr/bin";

/// What to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    /// The program and its arguments; never empty.
    pub argv: Vec<OsString>,
    /// Where it starts; where we were started when nothing is said.
    pub working_directory: Option<PathBuf>,
    /// What is set in its environment on top of ours.
    pub environment: Vec<(String, String)>,
}

impl Command {
    /// Sets variables, whatever was said of them.
    pub fn set_environment(&mut self, variables: Vec<(String, String)>) {
        self.environment.retain(|(name, _)| variables.iter().all(|(set, _)| set != name));
        self.environment.extend(variables);
    }
}

/// A command in the form that the kernel takes.
#[derive(Debug)]
pub struct Plan {
    command: Command,
    search: Option<OsString>,
    pub(super) candidates: Vec<CString>,
    pub(super) working_directory: Option<CString>,
    pub(super) argv: Vec<*const libc::c_char>,
    /// `/bin/sh`, room for the script, the arguments.
    pub(super) script_argv: Vec<*const libc::c_char>,
    pub(super) envp: Vec<*const libc::c_char>,
    /// What the service's is to be.
    pub(super) oom_score: oom::Score,
    /// The cgroup that it enters by itself, and whether it must.
    pub(super) entrance: Option<(RawFd, bool)>,
    /// What the pointers above point to.
    _strings: Vec<CString>,
}

impl Plan {
    /// Makes everything that exec will need.
    pub fn new(command: Command, oom_score: oom::Score) -> Plan {
        let environment = environment(&command.environment);
        let search = environment.iter().find(|(key, _)| key == "PATH").map(|(_, value)| value.clone());
        let program = &command.argv[0];
        let candidates = candidates(program, search.as_deref());
        let arguments: Vec<CString> = command.argv.iter().map(|argument| c_string(argument)).collect();
        let variables: Vec<CString> = environment.into_iter().map(variable).collect();
        let argv = pointers(&arguments);
        let mut script_argv = vec![c"/bin/sh".as_ptr(), ptr::null()];
        script_argv.extend(argv.iter().skip(1));
        let envp = pointers(&variables);
        Plan {
            candidates,
            working_directory: command.working_directory.as_ref().map(|path| c_string(path.as_os_str())),
            argv,
            script_argv,
            envp,
            oom_score,
            entrance: None,
            _strings: arguments.into_iter().chain(variables).collect(),
            search: (!program.as_bytes().contains(&b'/'))
                .then(|| search.unwrap_or_else(|| OsString::from(DEFAULT_PATH))),
            command,
        }
    }
}

/// Our environment with the changes on top.
fn environment(changes: &[(String, String)]) -> Vec<(OsString, OsString)> {
    let changed = |key: &OsStr| changes.iter().any(|(name, _)| key == name.as_str());
    // The mark of who is kept was meant for us, if anybody gave it to us: what we start is ours to end.
    let kept = env::vars_os().filter(|(key, _)| !changed(key) && key != marks::KEEP);
    kept.chain(changes.iter().map(|(name, value)| (name.into(), value.into()))).collect()
}

/// The paths to try. A name with a slash is one already; an empty name is nowhere.
fn candidates(program: &OsStr, search: Option<&OsStr>) -> Vec<CString> {
    if program.is_empty() {
        return vec![];
    }
    if program.as_bytes().contains(&b'/') {
        return vec![c_string(program)];
    }
    env::split_paths(search.unwrap_or(OsStr::new(DEFAULT_PATH)))
        .map(|directory| c_string(directory.join(program).as_os_str()))
        .collect()
}

fn variable((key, value): (OsString, OsString)) -> CString {
    let mut text = key.into_vec();
    text.push(b'=');
    text.extend(value.into_vec());
    c_string(OsStr::from_bytes(&text))
}

/// Arguments and environment come from the kernel and cannot hold a NUL, and the configuration refuses one; were there
/// one all the same, the kernel would end the string there, and so do we.
fn c_string(text: &OsStr) -> CString {
    let bytes = text.as_bytes();
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    CString::new(&bytes[..end]).unwrap_or_default()
}

fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect()
}

/// What the child was doing when it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Session,
    Group,
    WorkingDirectory,
    Execute,
    Cgroup,
}

/// What the child tells through the pipe.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failure {
    pub(super) step: Step,
    pub(super) errno: i32,
    /// Which of the candidates.
    pub(super) candidate: usize,
}

impl Failure {
    /// What the last system call said. Async-signal-safe.
    pub(super) fn last(step: Step, candidate: usize) -> Failure {
        // SAFETY: errno of this thread; no function that could change it was called in between.
        let errno = unsafe { *libc::__errno_location() };
        Failure { step, errno, candidate }
    }

    pub(super) fn encode(self) -> [u8; 13] {
        let mut message = [0; 13];
        message[0] = match self.step {
            Step::Session => 0,
            Step::Group => 1,
            Step::WorkingDirectory => 2,
            Step::Execute => 3,
            Step::Cgroup => 4,
        };
        message[1..5].copy_from_slice(&self.errno.to_ne_bytes());
        message[5..].copy_from_slice(&(self.candidate as u64).to_ne_bytes());
        message
    }

    fn decode(message: [u8; 13]) -> Failure {
        let [step, e0, e1, e2, e3, candidate @ ..] = message;
        let step = match step {
            0 => Step::Session,
            1 => Step::Group,
            2 => Step::WorkingDirectory,
            4 => Step::Cgroup,
            _ => Step::Execute,
        };
        let candidate = usize::try_from(u64::from_ne_bytes(candidate)).unwrap_or(0);
        Failure { step, errno: i32::from_ne_bytes([e0, e1, e2, e3]), candidate }
    }
}

/// Why there is no service, in words for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartError {
    /// What it means for the exit code.
    pub kind: StartErrorKind,
    text: String,
}

/// The three ways not to start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartErrorKind {
    /// There is no such command.
    NotFound,
    /// There is one, and it cannot be executed.
    NotExecutable,
    /// It did not come to that.
    Unable,
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Plan {
    fn explain(&self, failure: Failure) -> StartError {
        let error = reason(&io::Error::from_raw_os_error(failure.errno));
        let unable = |text: String| StartError { kind: StartErrorKind::Unable, text };
        match failure.step {
            Step::Session => unable(format!("cannot make a session for the service: {error}")),
            Step::Group => unable(format!("cannot make a process group for the service: {error}")),
            Step::WorkingDirectory => {
                let directory = self.command.working_directory.as_deref().unwrap_or(Path::new(""));
                unable(format!("cannot enter the working directory {directory:?}: {error}"))
            }
            Step::Cgroup => unable(format!("cannot enter the service's cgroup: {error}")),
            Step::Execute => self.explain_execute(failure, &error),
        }
    }

    fn explain_execute(&self, failure: Failure, error: &str) -> StartError {
        let program = &self.command.argv[0];
        let tried = self.candidates.get(failure.candidate).map(|path| Path::new(OsStr::from_bytes(path.to_bytes())));
        let absent = matches!(failure.errno, libc::ENOENT | libc::ENOTDIR);
        // The file is there and the kernel says it is not: what is missing is what the file asks for.
        let lacks_interpreter = absent && self.existing().is_some();
        let why = if lacks_interpreter {
            let file = self.existing().unwrap_or_default();
            format!("{} exists, but the interpreter or loader that it names does not", file.display())
        } else if let (true, Some(search)) = (absent, &self.search) {
            format!("not found (looked in {}): {error}", search.to_string_lossy().replace(':', ", "))
        } else if absent {
            format!("not found: {error}")
        } else if let Some(path) = tried.filter(|path| path.is_dir()) {
            format!("{error} ({} is a directory)", path.display())
        } else if let (Some(path), true) = (tried, self.search.is_some()) {
            format!("{error} ({})", without_secrets(path.as_os_str()))
        } else {
            error.to_owned()
        };
        let several_words = absent && self.command.argv.len() == 1 && program.as_bytes().contains(&b' ');
        let hint = if several_words { "; write the program and each argument as a word of its own" } else { "" };
        let kind = if absent && !lacks_interpreter { StartErrorKind::NotFound } else { StartErrorKind::NotExecutable };
        StartError { kind, text: format!("cannot execute {:?}: {why}{hint}", without_secrets(program)) }
    }

    /// The first candidate that exists as a file, as seen from the working directory of the service.
    fn existing(&self) -> Option<PathBuf> {
        let base = self.command.working_directory.clone().unwrap_or_default();
        let paths = self.candidates.iter().map(|path| base.join(OsStr::from_bytes(path.to_bytes())));
        paths.into_iter().find(|path| path.is_file())
    }
}

/// Where a whole line was taken for a program, its secrets are in the name.
fn without_secrets(text: &OsStr) -> String {
    mask::arguments(&[text.to_string_lossy()]).concat()
}

/// A main process in the making.
#[derive(Debug)]
pub struct Spawned {
    /// Its number, good until it is reaped.
    pub pid: Pid,
    /// How the start goes.
    pub progress: Progress,
}

/// The pipe that closes when the command is executed, or brings the failure.
#[derive(Debug)]
pub struct Progress {
    pipe: File,
    plan: Plan,
}

/// The cgroup that the main process is to be in.
#[derive(Clone, Copy, Debug)]
pub struct Destined<'c> {
    /// Which.
    pub cgroup: &'c Cgroup,
    /// Whether the service is not to be started outside of it.
    pub must: bool,
}

/// Makes the main process.
///
/// # Errors
/// When the kernel gives no pipe or no process (EAGAIN at a limit, ENOMEM).
pub fn spawn(
    mut plan: Plan,
    inherited: &Inherited,
    placement: Placement,
    destined: Option<Destined<'_>>,
) -> Result<Spawned, StartError> {
    let unable = |what: &str| {
        let error = reason(&io::Error::last_os_error());
        StartError { kind: StartErrorKind::Unable, text: format!("cannot start the service: {what}: {error}") }
    };
    let mut ends = [0; 2];
    // SAFETY: `ends` has room for two descriptors.
    if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) } != 0 {
        return Err(unable("no pipe"));
    }
    // SAFETY: both are new and ours.
    let (reader, writer) = unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) };
    let mut entrance = None;
    let pid = match destined.map(|destined| fork_into(destined.cgroup.descriptor())) {
        Some(Ok(pid)) => pid,
        refused => {
            if let Some(Err(why)) = refused {
                info!("clone3 cannot put the service into its cgroup ({}); it enters by itself", reason(&why));
            }
            if let Some(Destined { cgroup, must }) = destined {
                // Kept open until the child has its copy. Where it cannot be opened, the write to it fails.
                entrance = cgroup.entrance().ok();
                plan.entrance = Some((entrance.as_ref().map_or(-1, AsRawFd::as_raw_fd), must));
            }
            // SAFETY: there is one thread, and the child runs `become_service` only, which keeps to async-signal-safe calls.
            unsafe { libc::fork() }
        }
    };
    let made = match pid {
        -1 => Err(unable("no process")),
        0 => child::become_service(&mut plan, inherited, placement, writer.as_raw_fd()),
        pid => Ok(Spawned { pid, progress: Progress { pipe: File::from(reader), plan } }),
    };
    drop(entrance);
    made
}

/// Becomes the command. Gives why not.
pub fn replace_ourselves(mut plan: Plan, inherited: &Inherited) -> StartError {
    let failure = child::become_command(&mut plan, inherited);
    plan.explain(failure)
}

/// CLONE_INTO_CGROUP (clone(2), Linux 5.7); the C library's constant has lost its bit on some targets.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Forks a child that is in the cgroup from its first instruction on: -1 when there is no process to be had.
///
/// # Errors
/// When the kernel knows no such call, or a filter refuses it, or the cgroup may not be entered.
pub fn fork_into(cgroup: BorrowedFd<'_>) -> io::Result<Pid> {
    // SAFETY: all zero is a valid clone_args.
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.flags = CLONE_INTO_CGROUP;
    arguments.exit_signal = u64::try_from(libc::SIGCHLD).unwrap_or_default();
    arguments.cgroup = u64::try_from(cgroup.as_raw_fd()).unwrap_or_default();
    // SAFETY: without CLONE_VM and a stack this is a fork; there is one thread, and the child keeps to async-signal-safe calls,
    // so that it does not matter that the C library knows nothing of it.
    let made = unsafe { libc::syscall(libc::SYS_clone3, &raw const arguments, size_of_val(&arguments)) };
    if made >= 0 {
        return Pid::try_from(made).map_err(io::Error::other);
    }
    let error = io::Error::last_os_error();
    // A limit on processes is none on clone3. (errno stays as it is for the caller.)
    if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::ENOMEM)) { Ok(-1) } else { Err(error) }
}

impl Progress {
    /// What the pipe says now: nothing yet, that the command is executed, or why it is not.
    pub fn check(&mut self) -> Option<Result<(), StartError>> {
        let mut message = [0; 13];
        match self.pipe.read(&mut message) {
            Ok(13) => Some(Err(self.plan.explain(Failure::decode(message)))),
            // End of file: exec closed it. So did the death of the child before exec, of which its exit tells.
            Ok(_) => Some(Ok(())),
            Err(_) => None,
        }
    }
}

impl AsRawFd for Progress {
    fn as_raw_fd(&self) -> RawFd {
        self.pipe.as_raw_fd()
    }
}
