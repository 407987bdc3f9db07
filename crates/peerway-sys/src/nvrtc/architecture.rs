//! Target architectures, named as the compilers name them: `compute_80`, `sm_90`, `sm_90a`.

use std::fmt;
use std::str::FromStr;

/// The target of a compilation.
///
/// A virtual architecture (`compute_80`) produces PTX, text that a driver translates for any GPU
/// that is at least that new. A real one (`sm_90`) produces machine code, which that GPU runs as it
/// is.
///
/// ```
/// use peerway_sys::nvrtc::Architecture;
///
/// let architecture: Architecture = "sm_90a".parse()?;
/// assert!(architecture.is_real());
/// assert_eq!(architecture.number(), 90);
/// assert_eq!(Architecture::ptx(80).to_string(), "compute_80");
/// # Ok::<(), peerway_sys::nvrtc::NotAnArchitecture>(())
/// ```
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Architecture {
    real: bool,
    number: u32,
    features: Features,
}

/// The GPUs that can run the code, beyond the number.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
enum Features {
    /// Features that every later GPU of the generation has too.
    Common,
    /// `f`: GPUs of the same family.
    Family,
    /// `a`: only that GPU.
    Specific,
}

/// Text that is not an architecture.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("`{0}` is not an architecture: expected one such as sm_90, sm_90a or compute_80")]
pub struct NotAnArchitecture(pub String);

/// No architecture has more digits: 9.0 is 90, 12.1 is 121.
const DIGITS: usize = 4;

impl Architecture {
    /// Machine code for GPUs with that number: 90 for compute capability 9.0.
    pub const fn code(number: u32) -> Self {
        Self { real: true, number, features: Features::Common }
    }

    /// PTX for GPUs with that number and later ones.
    pub const fn ptx(number: u32) -> Self {
        Self { real: false, number, features: Features::Common }
    }

    /// Whether the target is machine code, not PTX.
    pub fn is_real(self) -> bool {
        self.real
    }

    /// The compute capability without the point.
    pub fn number(self) -> u32 {
        self.number
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.real { "sm" } else { "compute" };
        let suffix = match self.features {
            Features::Common => "",
            Features::Family => "f",
            Features::Specific => "a",
        };
        write!(f, "{kind}_{}{suffix}", self.number)
    }
}

impl FromStr for Architecture {
    type Err = NotAnArchitecture;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let not = || NotAnArchitecture(text.to_owned());
        let (kind, rest) = text.split_once('_').ok_or_else(not)?;
        let real = match kind {
            "sm" => true,
            "compute" => false,
            _ => return Err(not()),
        };
        let digits = rest.trim_end_matches(|c: char| !c.is_ascii_digit());
        let features = match &rest[digits.len()..] {
            "" => Features::Common,
            "f" => Features::Family,
            "a" => Features::Specific,
            _ => return Err(not()),
        };
        let plain = digits.bytes().all(|digit| digit.is_ascii_digit());
        // Each architecture has one spelling, so names also compare as text.
        if !plain || digits.starts_with('0') || digits.len() > DIGITS {
            return Err(not());
        }
        Ok(Self { real, number: digits.parse().map_err(|_| not())?, features })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back_as_they_were() {
        for name in ["sm_80", "sm_90a", "sm_100f", "compute_80", "compute_121a"] {
            assert_eq!(name.parse::<Architecture>().unwrap().to_string(), name);
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in ["", "sm", "sm_", "sm_090", "sm_9x", "sm_90aa", "lto_90", "sm_+9", "sm_99999"] {
            assert_eq!(text.parse::<Architecture>(), Err(NotAnArchitecture(text.to_owned())));
        }
    }
}
