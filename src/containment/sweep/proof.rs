//! What proves by its environment that a process is of an earlier invocation.

use super::Scope;
use crate::process::marks::{INVOCATION, Marks, NAME, ROOTS_BASE, RUNTIME};
use crate::process::proc::{Proc, Process};

/// Where we are: what a process has to share with us for its name to mean what ours means.
#[derive(Clone, Debug, Default)]
pub(super) struct Here {
    pub(super) boot: String,
    pub(super) pid_namespace: u64,
    root: Option<(u64, u64)>,
    /// The device of the base of our runtime directory.
    place: Option<u64>,
    /// XDG_RUNTIME_DIR, unless we are root, whose runtime directory is always at one place.
    runtime: Option<String>,
}

impl Here {
    pub(super) fn look_around(proc: &Proc, uid: u32) -> Here {
        let us = nix::unistd::getpid().as_raw();
        let ours = proc.process(us).ok();
        let runtime = std::env::var_os(RUNTIME).filter(|_| uid != 0);
        Here {
            boot: proc.boot_id().unwrap_or_default(),
            pid_namespace: ours.as_ref().and_then(|ours| ours.pid_namespace()).unwrap_or(0),
            root: ours.as_ref().and_then(Process::root),
            place: ours.and_then(|ours| {
                ours.device_of(runtime.as_ref().map_or(ROOTS_BASE, |path| path.to_str().unwrap_or("")))
            }),
            runtime: runtime.map(|path| path.to_string_lossy().into_owned()),
        }
    }
}

/// Whether this process was made by an earlier invocation of this name, whatever has become of its parents.
///
/// The UUID of a recorded invocation is proof enough. The name alone is one only if nobody else can mean another run by it:
/// the process is this very user's in every respect, in our pid namespace, below our root directory, and with our runtime
/// directory, on the same device. Else a container's run of the same name, which has a lock of its own, would be taken for a leftover of ours.
pub(super) fn is_leftover(scope: &Scope, here: &Here, marks: &Marks) -> bool {
    if marks.values(INVOCATION).any(|id| id == scope.present) {
        return false;
    }
    if marks.values(INVOCATION).any(|id| scope.former.iter().any(|former| former.id == id)) {
        return true;
    }
    let name = scope.mark_of_name();
    let has_our_runtime =
        here.runtime.as_ref().is_none_or(|ours| marks.values(RUNTIME).all(|theirs| theirs == ours.as_str()));
    marks.values(NAME).any(|value| value == name)
        && marks.uids == Some([scope.uid; 3])
        && here.pid_namespace != 0
        && marks.pid_namespace == Some(here.pid_namespace)
        && here.root.is_some()
        && marks.root == here.root
        && here.place.is_some()
        && marks.place == here.place
        && has_our_runtime
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::Invocation;

    fn scope() -> Scope {
        let former = vec![Invocation::begin("former".to_owned())];
        Scope {
            name: "web".parse().unwrap(),
            uid: 1000,
            present: "present".to_owned(),
            former,
            ours: vec![],
            allow_keep: false,
        }
    }

    fn here() -> Here {
        Here {
            boot: "boot".to_owned(),
            pid_namespace: 7,
            root: Some((1, 2)),
            place: Some(3),
            runtime: Some("/run/user/1000".to_owned()),
        }
    }

    fn marks(entries: &[&str]) -> Marks {
        Marks {
            has_environment: true,
            entries: entries.iter().map(|entry| (*entry).to_owned()).collect(),
            uids: Some([1000; 3]),
            pid_namespace: Some(7),
            root: Some((1, 2)),
            place: Some(3),
        }
    }

    #[test]
    fn the_uuid_of_a_former_invocation_is_proof_for_any_user_anywhere() {
        let named =
            Marks { uids: Some([0, 1, 2]), pid_namespace: None, root: None, ..marks(&["SUPERVISE_INVOCATION=former"]) };
        assert!(is_leftover(&scope(), &here(), &named));
        for other in ["SUPERVISE_INVOCATION=other", "SUPERVISE_INVOCATION=forme", "SUPERVISE_INVOCATION=former2"] {
            assert!(!is_leftover(&scope(), &here(), &marks(&[other])), "{other}");
        }
    }

    #[test]
    fn the_present_invocation_is_never_touched() {
        for id in ["SUPERVISE_NAME=1000/web", "SUPERVISE_INVOCATION=former"] {
            assert!(!is_leftover(&scope(), &here(), &marks(&[id, "SUPERVISE_INVOCATION=present"])), "{id}");
        }
    }

    #[test]
    fn the_name_counts_if_it_is_exactly_ours() {
        assert!(is_leftover(&scope(), &here(), &marks(&["SUPERVISE_NAME=1000/web", "SUPERVISE_INVOCATION=unknown"])));
        for other in ["0/web", "1000/web2", "1000/we", "web", "1000/web ", ""] {
            assert!(!is_leftover(&scope(), &here(), &marks(&[&format!("SUPERVISE_NAME={other}")])), "{other}");
        }
    }

    #[test]
    fn the_name_is_no_proof_of_who_shares_not_all_with_us() {
        let named = marks(&["SUPERVISE_NAME=1000/web"]);
        for uids in [[1000, 1000, 0], [1000, 0, 1000], [0, 1000, 1000]] {
            assert!(!is_leftover(&scope(), &here(), &Marks { uids: Some(uids), ..named.clone() }), "{uids:?}");
        }
        assert!(!is_leftover(&scope(), &here(), &Marks { uids: None, ..named.clone() }));
        for pid_namespace in [None, Some(8)] {
            assert!(!is_leftover(&scope(), &here(), &Marks { pid_namespace, ..named.clone() }));
        }
        for root in [None, Some((1, 3)), Some((2, 2))] {
            assert!(!is_leftover(&scope(), &here(), &Marks { root, ..named.clone() }));
        }
        for place in [None, Some(4)] {
            assert!(!is_leftover(&scope(), &here(), &Marks { place, ..named.clone() }));
        }
        let elsewhere = marks(&["SUPERVISE_NAME=1000/web", "XDG_RUNTIME_DIR=/tmp/x"]);
        assert!(!is_leftover(&scope(), &here(), &elsewhere));
        // Of ourselves we have to know as much.
        let nowhere = Here { pid_namespace: 0, root: None, ..here() };
        let unknown = Marks { pid_namespace: Some(0), root: None, ..named };
        assert!(!is_leftover(&scope(), &nowhere, &unknown));
    }
}
