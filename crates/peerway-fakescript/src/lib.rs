//! What the fakes share: the seeded scripts of their faults, and the support of their tests.
//!
//! A script is a list of items that are separated by commas; each is a word or `name=value`.
//! Chances are percentages (`1%`, `0.5%`), times have a unit (`us`, `ms`, `s`). Each fake knows its
//! own items. A script that does not parse gives no devices: a test without the faults that it
//! asked for would prove nothing.

use std::str::FromStr;
use std::time::Duration;

pub mod testing;

/// Gives each item of `text` to `item`, beginning with a script without faults.
///
/// # Errors
///
/// A text that names the item and its mistake.
pub fn parse<S: Default>(
    text: &str,
    item: impl Fn(&mut S, &str) -> Result<(), String>,
) -> Result<S, String> {
    let mut script = S::default();
    for text in text.split(',').map(str::trim).filter(|text| !text.is_empty()) {
        item(&mut script, text).map_err(|why| format!("`{text}`: {why}"))?;
    }
    Ok(script)
}

/// A number of any type.
///
/// # Errors
///
/// The text is no number, or not one of this type.
pub fn number<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("`{text}` is not a number"))
}

/// A count with a maximum.
///
/// # Errors
///
/// The text is no number, or greater than `most`.
pub fn at_most(most: u32, text: &str) -> Result<u32, String> {
    let count = u32::try_from(number::<u64>(text)?).ok().filter(|count| *count <= most);
    count.ok_or_else(|| format!("must be at most {most}"))
}

/// A percentage as a number from 0 to 1.
///
/// # Errors
///
/// The text is no percentage.
pub fn chance(text: &str) -> Result<f64, String> {
    let percent = text.strip_suffix('%').and_then(|digits| digits.parse::<f64>().ok());
    match percent {
        Some(percent) if (0.0..=100.0).contains(&percent) => Ok(percent / 100.0),
        _ => Err(format!("`{text}` is not a percentage")),
    }
}

/// A time with its unit.
///
/// # Errors
///
/// The text has no number or no known unit.
pub fn time(text: &str) -> Result<Duration, String> {
    let at = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(at);
    let count = number(digits)?;
    match unit {
        "us" => Ok(Duration::from_micros(count)),
        "ms" => Ok(Duration::from_millis(count)),
        "s" => Ok(Duration::from_secs(count)),
        _ => Err(format!("`{text}` is not a time in us, ms or s")),
    }
}

/// A random generator: the same script and the same calls give the same results.
#[derive(Debug)]
pub struct Dice(u64);

impl Dice {
    /// The generator of this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// True with this chance. A chance of zero consumes no random number, so that unused faults do
    /// not change when the others occur.
    pub fn hit(&mut self, chance: f64) -> bool {
        chance > 0.0 && ((self.word() >> 11) as f64) < chance * (1u64 << 53) as f64
    }

    /// A random number below `bound`, or zero. The bounds are far below 2^64, so the bias does not
    /// show.
    pub fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 { 0 } else { self.word() % bound }
    }

    /// SplitMix64: small, and good enough for delays and the order of packets.
    fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dice_are_fair_enough_and_repeat() {
        let throw = || {
            let mut dice = Dice::new(3);
            (0..10_000).map(|_| dice.hit(0.2)).collect::<Vec<_>>()
        };
        let thrown = throw();
        assert_eq!(thrown, throw());
        let hits = thrown.iter().filter(|hit| **hit).count();
        assert!((1800..2200).contains(&hits), "{hits}");
        let mut dice = Dice::new(3);
        assert!(!dice.hit(0.0) && dice.hit(1.0));
    }

    #[test]
    fn dice_repeat_and_stay_below() {
        let throw = || {
            let mut dice = Dice::new(3);
            (0..1000).map(|_| dice.below(50)).collect::<Vec<_>>()
        };
        let thrown = throw();
        assert_eq!(thrown, throw());
        assert!(
            thrown.iter().all(|value| *value < 50) && thrown.contains(&0) && thrown.contains(&49)
        );
        assert_eq!(Dice::new(1).below(0), 0);
    }
}
