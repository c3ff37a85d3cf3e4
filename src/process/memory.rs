//! Memory that only the start needed, given back.
//!
//! The command line, the configuration and the log's set-up are most of this program's text, and all of it is mapped in
//! around what is touched. A supervisor lives as long as its service and uses little of it.

use std::ptr;

unsafe extern "C" {
    /// Where the program's image begins (ld(1)).
    static __executable_start: u8;
    /// Where its text ends.
    static etext: u8;
}

/// Gives back free heap, and the pages of our own text. The text is a mapping of our file that is never written to: what is
/// needed again is mapped again out of the page cache.
pub fn release() {
    // SAFETY: malloc_trim gives back what is free already. Between the two symbols of the linker lie headers, read-only data
    // and text, all of it private, unwritten and backed by the file (relocations are kept out of text), so dropping the
    // pages changes nothing that can be read there.
    unsafe {
        libc::malloc_trim(0);
        let page = usize::try_from(libc::sysconf(libc::_SC_PAGESIZE)).unwrap_or(4096);
        let start = (&raw const __executable_start).addr().next_multiple_of(page);
        let end = (&raw const etext).addr() / page * page;
        if start < end {
            let image = ptr::with_exposed_provenance_mut(start);
            libc::madvise(image, end - start, libc::MADV_DONTNEED);
        }
    }
}
