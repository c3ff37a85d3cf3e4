//! What the figures depend on: the machine, and what kind of binary each peer is.

use std::ffi::{CStr, c_char};
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::path::Path;
use std::thread;

/// Kernel, processors, and how busy they are.
pub(crate) fn machine() -> io::Result<String> {
    let names = names()?;
    let cpus = thread::available_parallelism()?;
    let cpuinfo = fs::read_to_string("/proc/cpuinfo")?;
    let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("");
    let load = fs::read_to_string("/proc/loadavg")?;
    Ok(format!(
        "{} {} {}, {cpus} CPUs ({}), load {}",
        text(&names.sysname),
        text(&names.release),
        text(&names.machine),
        model.trim_start_matches([' ', '\t', ':']),
        load.split_whitespace().next().unwrap_or("?"),
    ))
}

/// The release of the kernel, as far as two releases are told apart.
pub(crate) fn kernel() -> io::Result<(u32, u32)> {
    let release = text(&names()?.release);
    let mut numbers = release.split(['.', '-']).map_while(|number| number.parse().ok());
    Ok((numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)))
}

fn names() -> io::Result<libc::utsname> {
    let mut names = MaybeUninit::<libc::utsname>::uninit();
    // SAFETY: the pointer is valid for the write.
    if unsafe { libc::uname(names.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: uname has filled it.
    Ok(unsafe { names.assume_init() })
}

fn text(name: &[c_char]) -> String {
    // SAFETY: uname ends its strings in NUL.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) };
    name.to_string_lossy().into_owned()
}

/// Static or dynamic, and the size.
pub(crate) fn binary(program: &Path) -> io::Result<String> {
    let bytes = fs::read(program)?;
    let linking = match interpreter(&bytes) {
        Some(true) => "dynamic",
        Some(false) => "static",
        None => "not an ELF file of 64 bits",
    };
    Ok(format!("{linking}, {} kB", bytes.len() / 1000))
}

/// Whether an ELF file asks for a dynamic linker (a PT_INTERP among its program headers).
fn interpreter(elf: &[u8]) -> Option<bool> {
    const PT_INTERP: u32 = 3;
    let number = |at: usize, size: usize| {
        let bytes = elf.get(at..at.checked_add(size)?)?;
        Some(bytes.iter().rev().fold(0_usize, |number, &byte| number << 8 | usize::from(byte)))
    };
    if elf.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let (table, size, entries) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    let kinds = (0..entries).map(|at| number(table + at * size, 4));
    Some(kinds.flatten().any(|kind| kind == PT_INTERP as usize))
}
