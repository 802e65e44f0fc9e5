//! Faults planted on purpose, to show that the tests would see them. Nothing of this is in an
//! ordinary build.

/// Whether the planted fault of that name is chosen, by `TOOLSCOPE_FAULT` in a build with `--cfg
/// toolscope_faults`.
#[cfg(toolscope_faults)]
pub(crate) fn fault(name: &str) -> bool {
    static CHOSEN: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    CHOSEN.get_or_init(|| std::env::var("TOOLSCOPE_FAULT").unwrap_or_default()) == name
}

#[cfg(not(toolscope_faults))]
#[inline]
pub(crate) const fn fault(_name: &str) -> bool {
    false
}
