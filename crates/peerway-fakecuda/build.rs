//! Links the library so that it is never unloaded, like libcuda. A stream's thread may still be
//! ending when the program closes the library, and would return into unmapped code.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-link-arg-cdylib=-Wl,-z,nodelete");
}
