//! The input of a compilation.

use super::JitError;

/// A program in CUDA C++ with everything that it consists of.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Source {
    pub(super) name: String,
    pub(super) text: String,
    pub(super) headers: Vec<(String, String)>,
    pub(super) options: Vec<String>,
}

/// Options that make the compiler read files.
const READS_FILES: &[&str] = &[
    "-I",
    "--include-path",
    "-include",
    "--pre-include",
    "-pch",
    "--pch",
    "-use-pch",
    "--use-pch",
    "-optf",
    "--options-file",
];

/// Options that set the target, which the caller of [`super::compile`] already gives.
const ARCHITECTURE: &[&str] =
    &["-arch", "--gpu-architecture", "-gencode", "--generate-code", "-code", "--gpu-code"];

impl Source {
    /// A program. The compiler uses the name in its messages.
    pub fn new(name: impl Into<String>, text: impl Into<String>) -> Self {
        let (name, text) = (name.into(), text.into());
        Self { name, text, headers: Vec::new(), options: Vec::new() }
    }

    /// Adds a text that the program includes by this name.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, text: impl Into<String>) -> Self {
        self.headers.push((name.into(), text.into()));
        self
    }

    /// Adds a compiler option, such as `--std=c++17`. Options that set the architecture are
    /// refused.
    ///
    /// An option that makes the compiler read files (`-I`, `--pre-include`) turns off the cache for
    /// this program. The content of the files is not known here, and a stale image must not be
    /// found. The same holds for texts that include files by absolute paths. Other includes are
    /// searched only among [`Self::header`] and those directories, not next to a file with the
    /// program's name.
    #[must_use]
    pub fn option(mut self, option: impl Into<String>) -> Self {
        self.options.push(option.into());
        self
    }

    /// Refuses input that no compiler accepts.
    pub(super) fn check(&self) -> Result<(), JitError> {
        let headers = self.headers.iter().flat_map(|(name, text)| [name, text]);
        let mut texts = [&self.name, &self.text].into_iter().chain(headers).chain(&self.options);
        if texts.any(|text| text.contains('\0')) {
            return Err(JitError::Nul { name: self.name.replace('\0', "\\0") });
        }
        let says = |option: &&String| starts_with_any(option, ARCHITECTURE);
        match self.options.iter().find(says) {
            Some(option) => Err(JitError::ArchitectureOption { option: option.clone() }),
            None => Ok(()),
        }
    }

    /// Whether the image depends on nothing but this source.
    pub(super) fn is_whole(&self) -> bool {
        let headers = self.headers.iter().map(|(_, text)| text);
        let mut texts = headers.chain([&self.text]);
        !self.options.iter().any(|option| starts_with_any(option, READS_FILES))
            && !texts.any(|text| text.lines().any(includes_by_path))
    }
}

/// Whether a line includes a file by an absolute path.
fn includes_by_path(line: &str) -> bool {
    let directive = line.trim_start().strip_prefix('#').map(str::trim_start);
    let file = directive.and_then(|directive| directive.strip_prefix("include"));
    file.is_some_and(|file| starts_with_any(file, &["\"/", "</"]))
}

fn starts_with_any(option: &str, starts: &[&str]) -> bool {
    starts.iter().any(|start| option.trim_start().starts_with(start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_read_files_are_known() {
        let whole = |option: &str| Source::new("a.cu", "").option(option).is_whole();
        assert!(whole("--std=c++17") && whole("-DINCLUDE=1") && whole("--use_fast_math"));
        for option in ["-Iinclude", "-I", "--include-path=x", "--pre-include=x.h", "--pch"] {
            assert!(!whole(option), "{option}");
        }
        let whole = |text: &str| Source::new("a.cu", "").header("a.h", text).is_whole();
        assert!(whole("#include <a/b.h>\n#define A \"/\"\n// </"));
        assert!(!whole("int a;\n # include  \"/a/b.h\"") && !whole("#include</a/b.h>"));
    }

    #[test]
    fn input_that_no_compiler_accepts_is_refused() {
        let plain = Source::new("a.cu", "text");
        assert_eq!(plain.check(), Ok(()));
        let nul = Err(JitError::Nul { name: "a.cu".to_owned() });
        assert_eq!(Source::new("a.cu", "te\0xt").check(), nul);
        assert_eq!(plain.clone().header("a.h", "\0").check(), nul);
        assert_eq!(plain.clone().option("-D\0").check(), nul);
        let option = "-arch=sm_90".to_owned();
        let refused = Err(JitError::ArchitectureOption { option: option.clone() });
        assert_eq!(plain.option(option).check(), refused);
    }
}
