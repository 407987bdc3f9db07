//! NVRTC: CUDA C++ compiled at run time, where the compiler's library is found. It needs no GPU.

use std::ffi::{CStr, CString, OsString, c_char, c_int, c_void};
use std::fmt;

use crate::probe::load_with;
use crate::symbols::symbol_table;
use crate::{Found, Library, LoadError};

/// A libnvrtc that is ready to be called.
pub struct Nvrtc {
    symbols: Symbols,
    found: Found,
}

/// A program that does not compile, or a compiler that fails.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{call}: {error}\n{log}")]
#[non_exhaustive]
pub struct CompileError {
    /// The function of the library.
    pub call: &'static str,
    /// Its words.
    pub error: String,
    /// What the compiler said about the program.
    pub log: String,
}

impl Nvrtc {
    /// Opens libnvrtc: first the file that is named, then those of CUDA 13 and 12.
    ///
    /// # Errors
    ///
    /// [`LoadError`] with every place that was tried.
    pub fn load(named: Option<OsString>) -> Result<Self, LoadError> {
        let (found, symbols) = load_with(Library::Nvrtc, named, Symbols::resolve)?;
        Ok(Self { symbols, found })
    }

    /// Which file it is.
    pub fn found(&self) -> &Found {
        &self.found
    }

    /// Compiles to PTX. `options` are those of nvcc, such as `--gpu-architecture=compute_80`.
    ///
    /// # Errors
    ///
    /// [`CompileError`] with the compiler's log.
    pub fn compile(
        &self,
        source: &CStr,
        name: &CStr,
        options: &[&CStr],
    ) -> Result<CString, CompileError> {
        let mut program = Program { nvrtc: self, raw: std::ptr::null_mut() };
        let none = std::ptr::null();
        // SAFETY: writes one handle, given back when `program` is dropped; there are no headers.
        let result = unsafe {
            (self.symbols.nvrtcCreateProgram)(
                &mut program.raw,
                source.as_ptr(),
                name.as_ptr(),
                0,
                none,
                none,
            )
        };
        self.check("nvrtcCreateProgram", result, String::new)?;
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program is alive, and so are the options.
        let result = unsafe {
            (self.symbols.nvrtcCompileProgram)(
                program.raw,
                options.len() as c_int,
                options.as_ptr(),
            )
        };
        self.check("nvrtcCompileProgram", result, || program.log())?;
        let text = program.text(self.symbols.nvrtcGetPTXSize, self.symbols.nvrtcGetPTX);
        text.map_err(|result| self.error("nvrtcGetPTX", result, String::new()))
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
        // SAFETY: gives a constant string for any number.
        let words = unsafe { CStr::from_ptr((self.symbols.nvrtcGetErrorString)(result)) };
        CompileError { call, error: words.to_string_lossy().into_owned(), log }
    }
}

impl fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvrtc").field("found", &self.found).finish_non_exhaustive()
    }
}

struct Program<'a> {
    nvrtc: &'a Nvrtc,
    raw: *mut c_void,
}

type Size = unsafe extern "C" fn(*mut c_void, *mut usize) -> c_int;
type Text = unsafe extern "C" fn(*mut c_void, *mut c_char) -> c_int;

impl Program<'_> {
    fn log(&self) -> String {
        let symbols = &self.nvrtc.symbols;
        let log = self.text(symbols.nvrtcGetProgramLogSize, symbols.nvrtcGetProgramLog);
        log.map(|log| log.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// A text of the program's: its size is asked first.
    fn text(&self, size: Size, text: Text) -> Result<CString, c_int> {
        let mut len = 0;
        // SAFETY: the program is alive; writes one size, which counts the NUL.
        let result = unsafe { size(self.raw, &mut len) };
        if result != 0 {
            return Err(result);
        }
        let mut bytes = vec![0u8; len.max(1)];
        // SAFETY: as many bytes as the library asked for.
        let result = unsafe { text(self.raw, bytes.as_mut_ptr().cast()) };
        if result != 0 {
            return Err(result);
        }
        Ok(CStr::from_bytes_until_nul(&bytes).map(CStr::to_owned).unwrap_or_default())
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: made once.
            unsafe { (self.nvrtc.symbols.nvrtcDestroyProgram)(&mut self.raw) };
        }
    }
}

symbol_table! {
    /// The functions that libnvrtc exports and Peerway calls.
    #[allow(non_snake_case)]
    pub struct Symbols {
        required {
            fn nvrtcGetErrorString(c_int) -> *const c_char;
            fn nvrtcCreateProgram(
                *mut *mut c_void, *const c_char, *const c_char, c_int, *const *const c_char,
                *const *const c_char,
            ) -> c_int;
            fn nvrtcDestroyProgram(*mut *mut c_void) -> c_int;
            fn nvrtcCompileProgram(*mut c_void, c_int, *const *const c_char) -> c_int;
            fn nvrtcGetPTXSize(*mut c_void, *mut usize) -> c_int;
            fn nvrtcGetPTX(*mut c_void, *mut c_char) -> c_int;
            fn nvrtcGetProgramLogSize(*mut c_void, *mut usize) -> c_int;
            fn nvrtcGetProgramLog(*mut c_void, *mut c_char) -> c_int;
        }
        optional {}
    }
}
