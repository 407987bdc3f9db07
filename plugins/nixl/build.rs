//! Compiles the C++ part of the plugin.

const SOURCES: &[&str] = &["engine", "notifications", "plugin", "remote_agent", "request", "words"];

fn main() {
    let sources = SOURCES.iter().map(|name| format!("cpp/{name}.cpp"));
    cc::Build::new()
        .cpp(true)
        // NIXL is compiled with this standard, and requires it of plugins.
        .std("c++20")
        .include("../../include")
        .flag("-fvisibility=hidden")
        .warnings_into_errors(true)
        .extra_warnings(true)
        .files(sources)
        .compile("peerway_nixl");
    // Bind calls to the engine inside this library, even if the process has loaded other symbols
    // with the same names.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    // Never unload: the threads of an endpoint may still run when NIXL closes the plugin.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rerun-if-changed=cpp");
    println!("cargo::rerun-if-changed=../../include/peerway.h");
}
