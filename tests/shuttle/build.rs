//! Chooses the parts of the crate that are for shuttle.

fn main() {
    println!("cargo::rustc-check-cfg=cfg(toolscope_shuttle)");
    println!("cargo::rustc-cfg=toolscope_shuttle");
    println!("cargo::rerun-if-changed=build.rs");
}
