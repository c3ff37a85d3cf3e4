//! Makes the program begin in `src/entry.rs` where that exists for the machine.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let machine = std::env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default();
    let linux = std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|system| system == "linux");
    if linux && machine == "x86_64" {
        println!("cargo:rustc-link-arg-bin=supervise=-Wl,-e,supervise_entry");
    }
}
