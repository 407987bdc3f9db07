//! What a module is loaded from: PTX, or code that was compiled for a GPU. Neither is run: the names of the kernels in it
//! are all that is looked for.

use std::ffi::{CStr, c_char, c_void};

/// The start of code: an ELF file, whose header tells its parts.
const ELF: &[u8; 4] = b"\x7fELF";
/// The section of a kernel begins so, and ends with its name.
const KERNEL: &str = ".text.";

/// The names of the kernels in an image; `None` for what is no image.
///
/// # Safety
///
/// `image` is a string, or an ELF file that is all there.
pub(crate) unsafe fn kernels(image: *const c_void) -> Option<Vec<String>> {
    let image: *const u8 = image.cast();
    // A string may end before the fourth byte.
    // SAFETY: a byte is looked at only when those before it are not the end of a string.
    let is_elf = ELF.iter().enumerate().all(|(i, byte)| unsafe { *image.add(i) } == *byte);
    if is_elf {
        // SAFETY: the caller's promise.
        return unsafe { of_code(image) };
    }
    // SAFETY: the caller's promise.
    of_ptx(&unsafe { CStr::from_ptr(image.cast::<c_char>()) }.to_string_lossy())
}

fn of_ptx(text: &str) -> Option<Vec<String>> {
    let is_part_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '$';
    let name = |rest: &str| {
        let rest = rest.trim_start();
        let end = rest.find(|c| !is_part_of_name(c)).unwrap_or(rest.len());
        rest[..end].to_owned()
    };
    text.contains(".version").then(|| text.split(".entry").skip(1).map(name).collect())
}

/// # Safety
///
/// An ELF file that is all there.
unsafe fn of_code(image: *const u8) -> Option<Vec<String>> {
    // SAFETY: what the file's own headers say is inside it, by this function's contract.
    let bytes = |at: u64, len: u64| unsafe {
        std::slice::from_raw_parts(image.add(at as usize), len as usize)
    };
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |sum, b| sum << 8 | u64::from(*b));
    // The header of a file with 64-bit addresses, and of a section: System V ABI, chapter 4.
    let header = bytes(0, 64);
    if header[4] != 2 {
        return None;
    }
    let sections = number(&header[0x28..0x30]);
    let (size, count) = (number(&header[0x3a..0x3c]), number(&header[0x3c..0x3e]));
    let names = number(&header[0x3e..0x40]);
    if size < 64 || names >= count {
        return None;
    }
    let section = |index: u64| bytes(sections + index * size, size);
    let names = section(names);
    let names = bytes(number(&names[0x18..0x20]), number(&names[0x20..0x28]));
    let kernels = (0..count).filter_map(|index| {
        let name = names.get(number(&section(index)[..4]) as usize..)?;
        let name = CStr::from_bytes_until_nul(name).ok()?.to_str().ok()?;
        name.strip_prefix(KERNEL).map(str::to_owned)
    });
    Some(kernels.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_found_by_their_whole_names() {
        let text = ".version 8.0\n.visible .entry one(\n)\n.visible .entry\ttwo_ (";
        assert_eq!(of_ptx(text), Some(vec!["one".to_owned(), "two_".to_owned()]));
        assert_eq!(of_ptx("garbage .entry one("), None);
    }

    #[test]
    fn kernels_are_found_in_code() {
        // Two sections: the names, and a kernel's.
        let names = b"\0.shstrtab\0.text.one\0.nv.info.one\0";
        let mut file = vec![0; 64];
        file[..4].copy_from_slice(ELF);
        file[4] = 2;
        file[0x28] = 64;
        file[0x3a] = 64;
        file[0x3c] = 3;
        for (name, at, len) in [(1, 64 * 4, names.len() as u8), (11, 0, 0), (21, 0, 0)] {
            let mut section = [0; 64];
            section[0] = name;
            section[0x18..0x1a].copy_from_slice(&u16::to_le_bytes(at));
            section[0x20] = len;
            file.extend_from_slice(&section);
        }
        file.extend_from_slice(names);
        // SAFETY: a file that is all there.
        let found = unsafe { kernels(file.as_ptr().cast()) };
        assert_eq!(found, Some(vec!["one".to_owned()]));
        file[4] = 1;
        // SAFETY: as above.
        assert_eq!(unsafe { kernels(file.as_ptr().cast()) }, None);
    }
}
