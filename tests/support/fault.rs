//! System calls that fail, without hooks in the product: a seccomp filter set before its exec, which its tree inherits.
//!
//!     Supervise::new().fault(Fault::new().fails(libc::SYS_pidfd_open, libc::ENOSYS))
//!
//! A full disk is `Supervise::full_disk(path)`, or `/dev/full` for a file that exists.

use super::wire::Op;

/// The calls that fail, with their errno; all others work.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fault {
    rules: Vec<Rule>,
}

#[derive(Clone, Copy, Debug)]
struct Rule {
    call: u32,
    /// Index and low half of an argument.
    argument: Option<(u8, u32)>,
    errno: u16,
}

impl Fault {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// `call` always fails with `errno`.
    pub(crate) fn fails(self, call: libc::c_long, errno: i32) -> Self {
        self.rule(call, None, errno)
    }

    /// `call` fails when the low half of its argument `index` (from 0) is `value`.
    pub(crate) fn fails_with(self, call: libc::c_long, index: u8, value: u32, errno: i32) -> Self {
        self.rule(call, Some((index, value)), errno)
    }

    fn rule(mut self, call: libc::c_long, argument: Option<(u8, u32)>, errno: i32) -> Self {
        let (call, errno) = (u32::try_from(call).unwrap(), u16::try_from(errno).unwrap());
        self.rules.push(Rule { call, argument, errno });
        self
    }

    /// The BPF program. Empty when nothing fails.
    pub(super) fn ops(&self) -> Vec<Op> {
        if self.rules.is_empty() {
            return Vec::new();
        }
        // Offsets in struct seccomp_data: nr 0, arch 4, args 16.
        let mut ops = vec![load(4), equal(ARCH, 1, 0), ret(libc::SECCOMP_RET_ALLOW)];
        for Rule { call, argument, errno } in &self.rules {
            let fail = ret(libc::SECCOMP_RET_ERRNO | u32::from(*errno));
            ops.push(load(0));
            match argument {
                None => ops.extend([equal(*call, 0, 1), fail]),
                Some((index, value)) => {
                    let low = if cfg!(target_endian = "little") { 0 } else { 4 };
                    let offset = 16 + 8 * u32::from(*index) + low;
                    ops.extend([equal(*call, 0, 3), load(offset), equal(*value, 0, 1), fail]);
                }
            }
        }
        ops.push(ret(libc::SECCOMP_RET_ALLOW));
        ops
    }
}

#[cfg(target_arch = "x86_64")]
const ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCH: u32 = 0xc000_00b7;

fn load(offset: u32) -> Op {
    op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, offset)
}

fn equal(k: u32, jt: u8, jf: u8) -> Op {
    op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, jt, jf, k)
}

fn ret(k: u32) -> Op {
    op(libc::BPF_RET | libc::BPF_K, 0, 0, k)
}

fn op(code: u32, jt: u8, jf: u8, k: u32) -> Op {
    Op { code: u16::try_from(code).unwrap(), jt, jf, k }
}
