//! Chance that can be had again: a seed gives the same dice.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A small xorshift generator: a seed gives the same plans again, though not the same timing.
#[derive(Clone)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        // Spreads small seeds, and never is 0.
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % sides
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        let at = self.roll(from.len() as u64);
        from[usize::try_from(at).unwrap()]
    }

    pub(crate) fn micros(&mut self, below: u64) -> Duration {
        Duration::from_micros(self.roll(below))
    }

    /// Dice of its own for another task.
    pub(crate) fn split(&mut self) -> Self {
        Self::new(self.roll(u64::MAX))
    }
}

/// A number from the environment.
pub(crate) fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// `TOOLSCOPE_SEED`, or one of this moment.
pub(crate) fn seed() -> u64 {
    setting("TOOLSCOPE_SEED").unwrap_or_else(|| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        now.as_secs() ^ u64::from(now.subsec_nanos())
    })
}
