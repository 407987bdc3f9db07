//! NVRTC: compiles CUDA C++ at run time if the compiler's library is installed. It needs no GPU.

mod architecture;

use std::ffi::{CStr, CString, OsString, c_char, c_int, c_void};
use std::fmt;

use crate::probe::load_with;
use crate::symbols::symbol_table;
use crate::{Found, Library, LoadError};

pub use self::architecture::{Architecture, NotAnArchitecture};

/// A loaded libnvrtc.
pub struct Nvrtc {
    symbols: Symbols,
    found: Found,
}

/// The input of a compilation.
#[derive(Clone, Copy, Debug)]
pub struct Program<'a> {
    /// The CUDA C++ source.
    pub source: &'a CStr,
    /// The name in the compiler's messages.
    pub name: &'a CStr,
    /// The headers that the source may include: names and contents.
    pub headers: &'a [(&'a CStr, &'a CStr)],
    /// Options of nvcc, without the architecture.
    pub options: &'a [&'a CStr],
}

/// A compilation that failed.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{call}: {error}\n{log}")]
#[non_exhaustive]
pub struct CompileError {
    /// The function of the library.
    pub call: &'static str,
    /// The library's description of the error.
    pub error: String,
    /// The compiler's log.
    pub log: String,
}

impl Nvrtc {
    /// Opens libnvrtc: first the file `named`, then the libraries of CUDA 13 and 12.
    ///
    /// # Errors
    ///
    /// [`LoadError`] with every candidate.
    pub fn load(named: Option<OsString>) -> Result<Self, LoadError> {
        let (found, symbols) = load_with(Library::Nvrtc, named, Symbols::resolve)?;
        Ok(Self { symbols, found })
    }

    /// The file.
    pub fn found(&self) -> &Found {
        &self.found
    }

    /// The compiler's version, such as 12.9.
    ///
    /// # Errors
    ///
    /// [`CompileError`] if the library does not report its version.
    pub fn version(&self) -> Result<(u32, u32), CompileError> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes two ints.
        let result = unsafe { (self.symbols.nvrtcVersion)(&mut major, &mut minor) };
        self.check("nvrtcVersion", result, String::new)?;
        Ok((major.unsigned_abs(), minor.unsigned_abs()))
    }

    /// The numbers of the supported architectures, ascending. `None` if the library lacks the call
    /// (before 11.2).
    pub fn architectures(&self) -> Option<Vec<u32>> {
        let count = self.symbols.nvrtcGetNumSupportedArchs?;
        let list = self.symbols.nvrtcGetSupportedArchs?;
        let mut len = 0;
        // SAFETY: writes one int.
        if unsafe { count(&mut len) } != 0 {
            return None;
        }
        let mut numbers: Vec<c_int> = vec![0; usize::try_from(len).ok()?];
        // SAFETY: the vector has the length that the library reported.
        if unsafe { list(numbers.as_mut_ptr()) } != 0 {
            return None;
        }
        let mut numbers: Vec<u32> = numbers.into_iter().map(c_int::unsigned_abs).collect();
        numbers.sort_unstable();
        Some(numbers)
    }

    /// Compiles for an architecture: to PTX with a final NUL for a virtual one, to machine code for
    /// a real one. Several threads may call this at once.
    ///
    /// # Errors
    ///
    /// [`CompileError`] with the compiler's log.
    pub fn compile(
        &self,
        program: &Program<'_>,
        architecture: Architecture,
    ) -> Result<Vec<u8>, CompileError> {
        let made = Made::new(self, program)?;
        // The text has only digits and letters, so it contains no NUL.
        let architecture_option =
            CString::new(format!("--gpu-architecture={architecture}")).unwrap_or_default();
        let options = program.options.iter().copied().chain([architecture_option.as_c_str()]);
        let options: Vec<*const c_char> = options.map(CStr::as_ptr).collect();
        // SAFETY: `made` keeps the program, and the options outlive the call.
        let result = unsafe {
            (self.symbols.nvrtcCompileProgram)(made.raw, options.len() as c_int, options.as_ptr())
        };
        self.check("nvrtcCompileProgram", result, || made.log())?;
        let symbols = &self.symbols;
        let (call, size, bytes) = if architecture.is_real() {
            ("nvrtcGetCUBIN", symbols.nvrtcGetCUBINSize, symbols.nvrtcGetCUBIN)
        } else {
            ("nvrtcGetPTX", symbols.nvrtcGetPTXSize, symbols.nvrtcGetPTX)
        };
        let image = made.bytes(size, bytes);
        let image = image.map_err(|result| self.error(call, result, String::new()))?;
        if image.is_empty() {
            let error = format!(
                "the compiler produced no code for {architecture}: check the compile options"
            );
            return Err(CompileError { call, error, log: made.log() });
        }
        Ok(image)
    }

    fn check(
        &self,
        call: &'static str,
        result: c_int,
        log: impl FnOnce() -> String,
    ) -> Result<(), CompileError> {
        if result == 0 { Ok(()) } else { Err(self.error(call, result, log())) }
    }

    fn error(&self, call: &'static str, result: c_int, log: String) -> CompileError {
        // SAFETY: the library returns a constant string for any number.
        let words = unsafe { CStr::from_ptr((self.symbols.nvrtcGetErrorString)(result)) };
        CompileError { call, error: words.to_string_lossy().into_owned(), log }
    }
}

impl fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvrtc").field("found", &self.found).finish_non_exhaustive()
    }
}

/// A program inside the library.
struct Made<'a> {
    nvrtc: &'a Nvrtc,
    raw: *mut c_void,
}

type Size = unsafe extern "C" fn(*mut c_void, *mut usize) -> c_int;
type Bytes = unsafe extern "C" fn(*mut c_void, *mut c_char) -> c_int;

impl<'a> Made<'a> {
    fn new(nvrtc: &'a Nvrtc, program: &Program<'_>) -> Result<Self, CompileError> {
        let names: Vec<*const c_char> = program.headers.iter().map(|h| h.0.as_ptr()).collect();
        let texts: Vec<*const c_char> = program.headers.iter().map(|h| h.1.as_ptr()).collect();
        let mut made = Self { nvrtc, raw: std::ptr::null_mut() };
        // SAFETY: the call writes one handle, which `drop` destroys. There are as many texts as
        // names, and all of them outlive the call, which copies them.
        let result = unsafe {
            (nvrtc.symbols.nvrtcCreateProgram)(
                &mut made.raw,
                program.source.as_ptr(),
                program.name.as_ptr(),
                names.len() as c_int,
                texts.as_ptr(),
                names.as_ptr(),
            )
        };
        nvrtc.check("nvrtcCreateProgram", result, String::new)?;
        Ok(made)
    }

    fn log(&self) -> String {
        let symbols = &self.nvrtc.symbols;
        let log = self.bytes(symbols.nvrtcGetProgramLogSize, symbols.nvrtcGetProgramLog);
        let log = log.unwrap_or_default();
        String::from_utf8_lossy(log.split(|byte| *byte == 0).next().unwrap_or_default())
            .trim_end()
            .to_owned()
    }

    /// Reads an output of the program, after asking for its size.
    fn bytes(&self, size: Size, bytes: Bytes) -> Result<Vec<u8>, c_int> {
        let mut len = 0;
        // SAFETY: `self` keeps the program. The call writes one size, which includes the NUL of a
        // text.
        let result = unsafe { size(self.raw, &mut len) };
        if result != 0 {
            return Err(result);
        }
        if len == 0 {
            return Ok(Vec::new());
        }
        let mut held = vec![0u8; len];
        // SAFETY: `held` has the size that the library reported.
        let result = unsafe { bytes(self.raw, held.as_mut_ptr().cast()) };
        if result != 0 {
            return Err(result);
        }
        Ok(held)
    }
}

impl Drop for Made<'_> {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: `new` created the program once.
            unsafe { (self.nvrtc.symbols.nvrtcDestroyProgram)(&mut self.raw) };
        }
    }
}

symbol_table! {
    /// The functions that libnvrtc exports and Peerway calls.
    #[allow(non_snake_case)]
    pub struct Symbols {
        required {
            fn nvrtcVersion(*mut c_int, *mut c_int) -> c_int;
            fn nvrtcGetErrorString(c_int) -> *const c_char;
            fn nvrtcCreateProgram(
                *mut *mut c_void, *const c_char, *const c_char, c_int, *const *const c_char,
                *const *const c_char,
            ) -> c_int;
            fn nvrtcDestroyProgram(*mut *mut c_void) -> c_int;
            fn nvrtcCompileProgram(*mut c_void, c_int, *const *const c_char) -> c_int;
            fn nvrtcGetPTXSize(*mut c_void, *mut usize) -> c_int;
            fn nvrtcGetPTX(*mut c_void, *mut c_char) -> c_int;
            fn nvrtcGetCUBINSize(*mut c_void, *mut usize) -> c_int;
            fn nvrtcGetCUBIN(*mut c_void, *mut c_char) -> c_int;
            fn nvrtcGetProgramLogSize(*mut c_void, *mut usize) -> c_int;
            fn nvrtcGetProgramLog(*mut c_void, *mut c_char) -> c_int;
        }
        optional {
            // 11.2
            fn nvrtcGetNumSupportedArchs(*mut c_int) -> c_int;
            fn nvrtcGetSupportedArchs(*mut c_int) -> c_int;
        }
    }
}
