//! Compiles the C++ half, which NIXL's interface asks for.

const SOURCES: &[&str] = &["engine", "notifications", "plugin", "remote_agent", "request", "words"];

fn main() {
    let sources = SOURCES.iter().map(|name| format!("cpp/{name}.cpp"));
    cc::Build::new()
        .cpp(true)
        // What NIXL itself is compiled as, and asks of its plugins.
        .std("c++20")
        .include("../../include")
        .flag("-fvisibility=hidden")
        .warnings_into_errors(true)
        .extra_warnings(true)
        .files(sources)
        .compile("peerway_nixl");
    // Calls to the engine stay in this file, whatever else the process has loaded under the same names.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    // The threads of an endpoint may still run when NIXL lets go of the plugin.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rerun-if-changed=cpp");
    println!("cargo::rerun-if-changed=../../include/peerway.h");
}
