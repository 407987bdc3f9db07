//! The compiler: NVRTC, found at run time.

use std::ffi::{CStr, CString, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use peerway_sys::Library;
use peerway_sys::nvrtc::{Architecture, Nvrtc, Program};

use super::Source;

/// A compiler.
pub(super) trait Compiler: Send + Sync {
    /// Identifies the compiler. Images of compilers with different identities are never exchanged.
    fn identity(&self) -> &str;

    /// The numbers of the supported architectures, ascending; `None` if the compiler does not list
    /// them.
    fn knows(&self) -> Option<&[u32]>;

    /// The image, or the compiler's messages about the program. The source was checked.
    fn compile(&self, source: &Source, architecture: Architecture) -> Result<Vec<u8>, String>;
}

/// The NVRTC of this process, or where it was searched. The search repeats while there is none: a
/// library that other code loads later, such as torch's, is found by its name from then on.
pub(super) fn find() -> Result<Arc<dyn Compiler>, String> {
    static FOUND: Mutex<Option<Arc<FoundCompiler>>> = Mutex::new(None);
    let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(compiler) = &*found {
        return Ok(compiler.clone());
    }
    let compiler = match (Library::Nvrtc.named(), suggested().clone()) {
        (None, Some(path)) => FoundCompiler::load_suggested(&path)?,
        (named, _) => FoundCompiler::load(named)?,
    };
    let compiler = Arc::new(compiler);
    *found = Some(compiler.clone());
    Ok(compiler)
}

/// See [`super::suggest_compiler`].
pub(super) fn suggest(path: PathBuf) {
    *suggested() = Some(path);
}

fn suggested() -> MutexGuard<'static, Option<PathBuf>> {
    static SUGGESTED: Mutex<Option<PathBuf>> = Mutex::new(None);
    SUGGESTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An NVRTC that was found.
pub(super) struct FoundCompiler {
    nvrtc: Nvrtc,
    identity: String,
    knows: Option<Vec<u32>>,
}

impl FoundCompiler {
    /// Loads the library at that path, or otherwise the library that the system finds.
    pub(super) fn load_suggested(path: &Path) -> Result<Self, String> {
        Self::load(Some(path.into())).or_else(|at_that_place| {
            Self::load(None).map_err(|elsewhere| format!("{at_that_place}; {elsewhere}"))
        })
    }

    pub(super) fn load(named: Option<OsString>) -> Result<Self, String> {
        let nvrtc = Nvrtc::load(named).map_err(|error| error.to_string())?;
        let (major, minor) = nvrtc.version().map_err(|error| error.to_string())?;
        // Updates of one version have the same version number but different sizes.
        let file = nvrtc.found().path.as_deref().and_then(|path| fs::metadata(path).ok());
        let size = file.map_or_else(String::new, |file| format!(" ({} bytes)", file.len()));
        let identity = format!("NVRTC {major}.{minor}{size}");
        let knows = nvrtc.architectures();
        Ok(Self { nvrtc, identity, knows })
    }
}

impl Compiler for FoundCompiler {
    fn identity(&self) -> &str {
        &self.identity
    }

    fn knows(&self) -> Option<&[u32]> {
        self.knows.as_deref()
    }

    fn compile(&self, source: &Source, architecture: Architecture) -> Result<Vec<u8>, String> {
        let c_string =
            |text: &String| CString::new(text.as_str()).map_err(|error| error.to_string());
        let headers =
            source.headers.iter().map(|(name, text)| Ok((c_string(name)?, c_string(text)?)));
        let headers: Vec<(CString, CString)> = headers.collect::<Result<_, String>>()?;
        let headers: Vec<(&CStr, &CStr)> = headers.iter().map(|(n, t)| (&**n, &**t)).collect();
        let options = source.options.iter().map(c_string);
        let options: Vec<CString> = options.collect::<Result<_, String>>()?;
        // Do not include files next to a file with the source's name: the key does not cover them.
        let options: Vec<&CStr> =
            options.iter().map(|o| &**o).chain([c"--no-source-include"]).collect();
        let program = Program {
            source: &c_string(&source.text)?,
            name: &c_string(&source.name)?,
            headers: &headers,
            options: &options,
        };
        self.nvrtc.compile(&program, architecture).map_err(|error| error.to_string())
    }
}
