//! Plans: what a schedule consists of, as a short text.

use std::fmt;
use std::str::FromStr;

/// Faults that a schedule may have, a bit each.
pub(super) const BREAK: u8 = 1;
pub(super) const PAUSE: u8 = 2;
pub(super) const CANCEL: u8 = 4;
pub(super) const REVOKE: u8 = 8;
pub(super) const DISCONNECT: u8 = 16;
pub(super) const LIE: u8 = 32;
const ALL: u8 = 63;

/// A schedule. The same plan gives the same run.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Plan {
    pub(super) seed: u64,
    pub(super) steps: u32,
    pub(super) lanes: u8,
    pub(super) faults: u8,
}

impl Plan {
    /// The plan of a seed: one to four lanes, up to 400 steps, any choice of faults.
    pub(super) fn from_seed(seed: u64) -> Self {
        let mut random = Random::new(seed ^ 0x5eed);
        let steps = 20 + random.below(380) as u32;
        let lanes = 1 + random.below(4) as u8;
        Self { seed, steps, lanes, faults: random.below(u64::from(ALL) + 1) as u8 }
    }

    /// Plans that are simpler than this one, the simplest first.
    pub(super) fn smaller(self) -> Vec<Self> {
        let mut plans: Vec<Self> = [2, 4, 8, 16, 64]
            .map(|part| Self { steps: self.steps - self.steps.div_ceil(part), ..self })
            .into();
        plans.extend((self.steps > 0).then(|| Self { steps: self.steps - 1, ..self }));
        let bits = (0..8).map(|bit| 1 << bit).filter(|bit| self.faults & bit != 0);
        plans.extend(bits.map(|bit| Self { faults: self.faults & !bit, ..self }));
        plans.retain(|plan| *plan != self);
        plans
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}:{}", self.seed, self.steps, self.lanes, self.faults)
    }
}

impl FromStr for Plan {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not a plan: expected SEED:STEPS:LANES:FAULTS");
        let mut numbers = text.split(':').map(|part| part.parse::<u64>().map_err(|_| wrong()));
        let mut next = || numbers.next().unwrap_or_else(|| Err(wrong()));
        let (seed, steps, lanes, faults) = (next()?, next()?, next()?, next()?);
        Ok(Self { seed, steps: steps as u32, lanes: lanes as u8, faults: faults as u8 })
    }
}

/// SplitMix64: small, and good enough to choose steps.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`, which is not 0.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub(super) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}
