//! What is compiled.

use super::JitError;

/// A program in CUDA C++, with all that it is made of.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Source {
    pub(super) name: String,
    pub(super) text: String,
    pub(super) headers: Vec<(String, String)>,
    pub(super) options: Vec<String>,
}

/// Options by which the compiler reads files.
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

/// Options that say what the caller of [`super::compile`] says.
const ARCHITECTURE: &[&str] =
    &["-arch", "--gpu-architecture", "-gencode", "--generate-code", "-code", "--gpu-code"];

impl Source {
    /// A program; the name is what the compiler calls it in its messages.
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

    /// Adds an option of the compiler, such as `--std=c++17`; the architecture is none of them.
    ///
    /// With one that has the compiler read files (`-I`, `--pre-include`), nothing is kept on disk: what the files say is
    /// not known here, and an image that no longer fits them must not be found. The same goes for texts that include
    /// files by their full paths. Other includes are looked for nowhere but among [`Self::header`] and those directories,
    /// not beside the file that the name seems to be of.
    #[must_use]
    pub fn option(mut self, option: impl Into<String>) -> Self {
        self.options.push(option.into());
        self
    }

    /// Refuses what no compiler could be given.
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

    /// Whether it is all that its image depends on.
    pub(super) fn is_whole(&self) -> bool {
        let headers = self.headers.iter().map(|(_, text)| text);
        let mut texts = headers.chain([&self.text]);
        !self.options.iter().any(|option| starts_with_any(option, READS_FILES))
            && !texts.any(|text| text.lines().any(includes_by_path))
    }
}

/// Whether a line includes a file by its full path.
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
    fn what_no_compiler_takes_is_refused() {
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
