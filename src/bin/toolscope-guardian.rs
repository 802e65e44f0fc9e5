//! The guardian of a tool's process tree, as a program of its own.

fn main() {
    toolscope::guardian::init();
    // Started by hand it gets here: as a guardian it does not return.
    toolscope::guardian::refuse();
}
