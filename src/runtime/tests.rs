//! Claims about the runtime directory, with real files.

#[path = "../../tests/support/apart.rs"]
pub(crate) mod apart;
#[expect(dead_code, reason = "not every need is ours")]
#[path = "../../tests/support/need.rs"]
pub(crate) mod need;

use super::*;
use apart::holds_apart;
use need::need_root;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use tempfile::TempDir;

/// Nobody's number.
const FOREIGNER: u32 = 54_321;

struct Place {
    base: TempDir,
    owner: u32,
}

impl Place {
    fn new() -> Place {
        Place { base: TempDir::new().unwrap(), owner: nix::unistd::geteuid().as_raw() }
    }

    fn enter(&self) -> Result<Runtime, Failure> {
        Runtime::enter_below(self.base.path(), self.owner, &"web".parse().unwrap(), std::process::id().cast_signed())
    }

    fn entered(&self) -> Runtime {
        match self.enter() {
            Ok(runtime) => runtime,
            Err(Failure::Without(why)) => panic!("{why}"),
            Err(Failure::Refused(why)) => panic!("{why}"),
        }
    }

    fn refused(&self) -> Refused {
        match self.enter() {
            Err(Failure::Refused(refused)) => refused,
            Err(Failure::Without(why)) => panic!("not refused, but without: {why}"),
            Ok(_) => panic!("not refused"),
        }
    }

    /// Says what is not ours and what to do.
    fn is_not_ours(&self, what: &str) {
        let refused = self.refused();
        assert!(matches!(refused, Refused::NotOurs(_)), "{refused}");
        let text = refused.to_string();
        assert!(text.contains(what) && text.contains("remove it") && text.contains("supervise"), "{text}");
    }

    fn without(&self) -> String {
        match self.enter() {
            Err(Failure::Without(why)) => why,
            Err(Failure::Refused(why)) => panic!("refused: {why}"),
            Ok(_) => panic!("there is one"),
        }
    }

    fn path(&self, below: &str) -> PathBuf {
        self.base.path().join("supervise").join(below)
    }
}

fn invocation(id: &str) -> Invocation {
    let one = Identity { pid: 77, start: 1234 };
    Invocation { supervisor: Some(one), main: Some(one), own_session: true, ..Invocation::begin(id.to_owned()) }
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn a_second_run_of_a_name_is_refused_with_the_pid_of_the_first() {
    let place = Place::new();
    let first = place.entered();
    assert_eq!(first.path(), place.path("web"));
    let refused = place.refused();
    assert_eq!(refused, Refused::Running { pid: Some(std::process::id().cast_signed()), name: "web".to_owned() });
    let text = format!("\"web\" is running already as pid {}; stop it first, ", std::process::id());
    assert!(refused.to_string().starts_with(&text), "{refused}");
    drop(first);
    drop(place.entered());
}

#[test]
fn whoever_has_a_copy_of_the_lock_holds_it() {
    let place = Place::new();
    let first = place.entered();
    let copy = first.lock().try_clone_to_owned().unwrap();
    assert!(first.descriptors().contains(&first.lock().as_raw_fd()));
    drop(first);
    assert!(matches!(place.refused(), Refused::Running { .. }));
    drop(copy);
    drop(place.entered());
}

#[test]
fn a_number_in_the_lock_that_is_not_the_announced_ones_any_more_is_not_believed() {
    let place = Place::new();
    let first = place.entered();
    let us = Some(std::process::id().cast_signed());
    // The kernel knows who took it, on a file system whose device it shows.
    for text in ["", "1 1\n", "1\n", "-1 7\n", "no number\n", "\u{fffd}"] {
        fs::write(place.path("web/lock"), text).unwrap();
        let Refused::Running { pid, .. } = place.refused() else { panic!("not running") };
        assert!(pid == us || pid.is_none(), "{text:?}: {pid:?}");
    }
    drop(first);
}

#[test]
fn the_holder_of_a_lock_is_found_among_the_kernels_locks() {
    let locks = "1: POSIX  ADVISORY  WRITE 5 00:2a:77 0 EOF\n2: FLOCK  ADVISORY  WRITE 66 00:2a:777 0 EOF\n\
                 3: FLOCK  ADVISORY  WRITE 7 00:2a:77 0 EOF\n3: -> FLOCK  ADVISORY  WRITE 8 00:2a:77 0 EOF\n";
    let device = libc::makedev(0, 0x2a);
    assert_eq!(holder_among(locks, device, 77), Some(7));
    assert_eq!(holder_among(locks, device, 7), None);
    assert_eq!(holder_among(locks, libc::makedev(1, 0x2a), 77), None);
}

#[test]
fn directories_and_files_are_for_their_owner_alone_whatever_the_umask() {
    for umask in [0o000, 0o777] {
        let place = Place::new();
        assert!(holds_apart(|| {
            nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(umask));
            let runtime = place.entered();
            runtime.record(&[invocation("a")]).unwrap();
            assert_eq!((mode(&place.path("")), mode(&place.path("web"))), (0o700, 0o700));
            assert_eq!((mode(&place.path("web/lock")), mode(&place.path("web/state.json"))), (0o600, 0o600));
        }));
    }
}

#[test]
fn a_link_is_refused_in_place_of_every_directory_and_of_the_lock() {
    let elsewhere = TempDir::new().unwrap();
    let place = Place::new();
    symlink(elsewhere.path(), place.base.path().join("supervise")).unwrap();
    place.is_not_ours("is not a directory");

    let place = Place::new();
    fs::create_dir(place.path("")).unwrap();
    symlink(elsewhere.path(), place.path("web")).unwrap();
    place.is_not_ours("is not a directory");

    for target in [elsewhere.path().join("missing"), place.base.path().to_owned()] {
        let place = Place::new();
        fs::create_dir_all(place.path("web")).unwrap();
        symlink(target, place.path("web/lock")).unwrap();
        place.is_not_ours("is a link");
    }
    assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0);
}

#[test]
fn what_is_no_file_is_refused_and_nobody_waits_for_it() {
    let place = Place::new();
    fs::create_dir_all(place.path("web/lock")).unwrap();
    place.is_not_ours("is not a file");

    let place = Place::new();
    fs::create_dir_all(place.path("web")).unwrap();
    nix::unistd::mkfifo(&place.path("web/lock"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    place.is_not_ours("is not a file");

    let place = Place::new();
    fs::write(place.base.path().join("supervise"), "").unwrap();
    place.is_not_ours("is not a directory");
}

#[test]
fn what_others_may_write_to_is_refused() {
    for (what, open) in [("", 0o777), ("", 0o770), ("web", 0o702), ("web", 0o1777), ("web/lock", 0o620)] {
        let place = Place::new();
        drop(place.entered());
        set_mode(&place.path(what), open);
        place.is_not_ours("can be written to by others");
        set_mode(&place.path(what), 0o700);
        drop(place.entered());
    }
}

#[test]
fn what_is_anothers_is_refused() {
    if !need_root() {
        return;
    }
    for what in ["", "web", "web/lock"] {
        let place = Place::new();
        drop(place.entered());
        chown(place.path(what), Some(FOREIGNER), None).unwrap();
        place.is_not_ours(&format!("belongs to user {FOREIGNER}"));
    }
    // Also when it cannot even be entered.
    let place = Place { owner: FOREIGNER, ..Place::new() };
    fs::create_dir_all(place.path("web")).unwrap();
    set_mode(&place.path(""), 0o700);
    set_mode(place.base.path(), 0o755);
    assert!(holds_apart(|| {
        become_foreigner();
        place.is_not_ours("belongs to user 0");
    }));
}

fn become_foreigner() {
    nix::unistd::setgroups(&[]).unwrap();
    nix::unistd::setresgid(FOREIGNER.into(), FOREIGNER.into(), FOREIGNER.into()).unwrap();
    nix::unistd::setresuid(FOREIGNER.into(), FOREIGNER.into(), FOREIGNER.into()).unwrap();
}

#[test]
fn without_a_place_for_it_the_run_goes_on_and_the_reason_is_told() {
    let place = Place::new();
    fs::remove_dir(place.base.path()).unwrap();
    assert!(place.without().contains("No such file or directory"), "{}", place.without());
    fs::create_dir(place.base.path()).unwrap();
    if !need_root() {
        return;
    }
    let place = Place { owner: FOREIGNER, ..place };
    assert!(holds_apart(|| {
        become_foreigner();
        assert!(place.without().contains("Permission denied"), "{}", place.without());
    }));
}

/// Mounts a file system of a few pages over the base, seen by nobody else.
fn mount(place: &Place, options: &str, flags: libc::c_ulong) {
    let path = std::ffi::CString::new(place.base.path().as_os_str().as_encoded_bytes()).unwrap();
    let options = std::ffi::CString::new(options).unwrap();
    // SAFETY: constants and null-terminated texts; the mount is made in a mount namespace of this process alone.
    unsafe {
        assert_eq!(libc::unshare(libc::CLONE_NEWNS), 0);
        let private = libc::MS_REC | libc::MS_PRIVATE;
        assert_eq!(libc::mount(c"none".as_ptr(), c"/".as_ptr(), std::ptr::null(), private, std::ptr::null()), 0);
        let mounted = libc::mount(c"none".as_ptr(), path.as_ptr(), c"tmpfs".as_ptr(), flags, options.as_ptr().cast());
        assert_eq!(mounted, 0);
    }
}

#[test]
fn a_read_only_file_system_is_a_reason_to_go_on_without() {
    if !need_root() {
        return;
    }
    let place = Place::new();
    assert!(holds_apart(|| {
        mount(&place, "", libc::MS_RDONLY);
        assert!(place.without().contains("Read-only file system"), "{}", place.without());
    }));
}

#[test]
fn a_full_file_system_is_a_reason_to_go_on_without() {
    if !need_root() {
        return;
    }
    for inodes in 1..=3 {
        let place = Place::new();
        assert!(holds_apart(|| {
            mount(&place, &format!("nr_inodes={inodes}"), 0);
            assert!(place.without().contains("No space left on device"), "{}", place.without());
        }));
    }
}

#[test]
fn on_a_full_file_system_the_lock_holds_and_an_old_record_stays() {
    let place = Place::new();
    assert!(holds_apart(|| {
        let runtime = place.entered();
        runtime.record(&[invocation("old")]).unwrap();
        drop(runtime);
        // No file may grow: what a full disk does, for anybody.
        // SAFETY: it changes this forked process only.
        unsafe {
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &raw const none), 0);
        }
        let runtime = place.entered();
        let Refused::Running { pid, .. } = place.refused() else { panic!("not running") };
        assert!(pid.is_none() || pid == Some(std::process::id().cast_signed()), "{pid:?}");
        runtime.record(&[invocation("new")]).unwrap_err();
        assert_eq!(runtime.former().unwrap(), [invocation("old")]);
        assert!(!place.path("web/state.json.new").exists());
    }));
}

#[test]
fn what_was_recorded_is_read_and_nothing_removes_the_record() {
    let place = Place::new();
    let runtime = place.entered();
    assert_eq!(runtime.former(), Ok(vec![]));
    let cgroup = Some(PathBuf::from("/sys/fs/cgroup/x"));
    let all = [invocation("a"), Invocation { cgroup, main: None, ..invocation("b") }];
    runtime.record(&all).unwrap();
    drop(runtime);
    let runtime = place.entered();
    assert_eq!(runtime.former().unwrap(), all);
    runtime.record(&[]).unwrap();
    assert_eq!(runtime.former(), Ok(vec![]));
    runtime.record(&[]).unwrap();
    assert_eq!(fs::read_dir(runtime.path()).unwrap().count(), 1, "the lock stays");
}

#[test]
fn a_record_never_grows_beyond_what_is_read() {
    let place = Place::new();
    let runtime = place.entered();
    let long = Some(PathBuf::from("/".repeat(4000)));
    let many: Vec<Invocation> =
        (0..2000).map(|n| Invocation { cgroup: long.clone(), ..invocation(&n.to_string()) }).collect();
    runtime.record(&many).unwrap();
    let read = runtime.former().unwrap();
    assert_eq!(read.last(), many.last());
}

#[test]
fn what_an_earlier_run_left_half_written_is_in_nobodys_way() {
    let place = Place::new();
    let runtime = place.entered();
    fs::write(place.path("web/state.json.new"), "{\"vers").unwrap();
    runtime.record(&[invocation("a")]).unwrap();
    assert_eq!(runtime.former().unwrap(), [invocation("a")]);
}

#[test]
fn a_record_that_cannot_be_understood_is_told_and_nothing_is_known() {
    let place = Place::new();
    let runtime = place.entered();
    let state = place.path("web/state.json");
    let deep = "[".repeat(100_000);
    for text in ["", "{", "null", "[]", "{\"version\":1}", "{\"version\":2,\"invocations\":[]}", "\0", &deep] {
        fs::write(&state, text).unwrap();
        let why = runtime.former().unwrap_err();
        assert!(why.contains("web/state.json is not used") && why.len() < 500, "{why}");
    }
    fs::write(&state, [0xff, 0xfe]).unwrap();
    runtime.former().unwrap_err();
    fs::write(&state, " ".repeat((1 << 20) + 1)).unwrap();
    assert!(runtime.former().unwrap_err().contains("larger than 1 MiB"));
    runtime.record(&[invocation("a")]).unwrap();
    assert_eq!(runtime.former().unwrap(), [invocation("a")]);
}

#[test]
fn a_record_that_is_not_ours_is_told_and_nothing_is_known() {
    let place = Place::new();
    let runtime = place.entered();
    let state = place.path("web/state.json");
    let genuine = place.path("web/genuine");
    runtime.record(&[invocation("a")]).unwrap();
    fs::rename(&state, &genuine).unwrap();
    symlink(&genuine, &state).unwrap();
    assert!(runtime.former().unwrap_err().contains("is a link"));
    fs::remove_file(&state).unwrap();
    fs::create_dir(&state).unwrap();
    assert!(runtime.former().unwrap_err().contains("is not a file"));
    fs::remove_dir(&state).unwrap();
    nix::unistd::mkfifo(&state, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(runtime.former().unwrap_err().contains("is not a file"));
    fs::rename(&genuine, &state).unwrap();
    set_mode(&state, 0o666);
    assert!(runtime.former().unwrap_err().contains("can be written to by others"));
    set_mode(&state, 0o600);
    runtime.former().unwrap();
    if need_root() {
        chown(&state, Some(FOREIGNER), None).unwrap();
        assert!(runtime.former().unwrap_err().contains(&format!("belongs to user {FOREIGNER}")));
    }
}

#[test]
fn a_users_runtime_directory_has_to_be_theirs_and_absolute() {
    let uid = nix::unistd::geteuid().as_raw();
    assert_eq!(base(0, Some("/nowhere".into())), Ok("/run".into()));
    let theirs = TempDir::new().unwrap();
    if uid != 0 {
        assert_eq!(base(uid, Some(theirs.path().into())), Ok(theirs.path().into()));
    }
    for (set, why) in [
        (None, "is not set"),
        (Some(""), "is not set"),
        (Some("tmp"), "no absolute path"),
        (Some("/does/not/exist"), "No such file"),
    ] {
        assert!(base(FOREIGNER, set.map(Into::into)).unwrap_err().contains(why), "{set:?}");
    }
    assert!(base(FOREIGNER, Some(theirs.path().into())).unwrap_err().contains("belongs to user"));
}

#[test]
fn a_number_that_an_earlier_run_announced_does_not_stay_when_there_is_no_room_for_ours() {
    let place = Place::new();
    drop(place.entered());
    let parent = Identity::find(nix::unistd::getppid().as_raw()).unwrap();
    fs::write(place.path("web/lock"), format!("{} {}\n", parent.pid, parent.start)).unwrap();
    assert!(holds_apart(|| {
        // SAFETY: it changes this forked process only.
        unsafe {
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &raw const none), 0);
        }
        let _first = place.entered();
        let Refused::Running { pid, .. } = place.refused() else { panic!("not running") };
        assert_ne!(pid, Some(parent.pid));
    }));
}

#[test]
fn a_directory_of_ours_that_others_may_look_into_is_closed_to_them() {
    let base = tempfile::tempdir().unwrap();
    let directory = base.path().join("supervise");
    fs::create_dir(&directory).unwrap();
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).unwrap();
    let owner = nix::unistd::geteuid().as_raw();
    place::make(base.path(), owner, &"web".parse().unwrap()).ok().unwrap();
    for path in [directory.clone(), directory.join("web")] {
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o700, "{}", path.display());
    }
}
