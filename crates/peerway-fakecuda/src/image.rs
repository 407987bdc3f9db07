//! The image of a module: PTX, or code compiled for a GPU. The library runs neither. It only reads
//! the names of the kernels.

use std::ffi::{CStr, c_char, c_void};

/// The first bytes of compiled code, which is an ELF file.
const ELF: &[u8; 4] = b"\x7fELF";
/// The prefix of a kernel's section name; the kernel's name follows.
const KERNEL: &str = ".text.";

/// The names of the kernels in an image; `None` if it is not an image.
///
/// # Safety
///
/// `image` is a zero-terminated string, or a complete ELF file.
pub(crate) unsafe fn kernels(image: *const c_void) -> Option<Vec<String>> {
    let image: *const u8 = image.cast();
    // A string may end before the fourth byte.
    // SAFETY: `all` stops at the first difference, so it reads a byte only if the bytes before it
    // do not end a string.
    let is_elf = ELF.iter().enumerate().all(|(i, byte)| unsafe { *image.add(i) } == *byte);
    if is_elf {
        // SAFETY: by this function's contract.
        return unsafe { of_code(image) };
    }
    // SAFETY: by this function's contract.
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
/// `image` is a complete ELF file.
unsafe fn of_code(image: *const u8) -> Option<Vec<String>> {
    // SAFETY: by this function's contract, the ranges that the file's headers name are inside it.
    let bytes = |at: u64, len: u64| unsafe {
        std::slice::from_raw_parts(image.add(at as usize), len as usize)
    };
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |sum, b| sum << 8 | u64::from(*b));
    // The 64-bit file header and the section headers: System V ABI, chapter 4.
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
        // Three sections: the section names, a kernel, and another section.
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
        // SAFETY: the file is complete.
        let found = unsafe { kernels(file.as_ptr().cast()) };
        assert_eq!(found, Some(vec!["one".to_owned()]));
        file[4] = 1;
        // SAFETY: the file is complete.
        assert_eq!(unsafe { kernels(file.as_ptr().cast()) }, None);
    }
}
