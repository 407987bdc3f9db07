//! Gives the shared library the name that it is installed and found under: the first number of the version, which changes with
//! the binary interface.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let major = std::env::var("CARGO_PKG_VERSION_MAJOR").unwrap_or_default();
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libpeerway.so.{major}");
}
