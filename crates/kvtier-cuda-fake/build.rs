//! Compiles the copy kernel's source for the processor.

fn main() {
    let kernel = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../kvtier-device/src/cuda/kernel"
    );
    for file in ["kvcopy.cu", "kvcopy_host.cpp"] {
        println!("cargo:rerun-if-changed={kernel}/{file}");
    }
    println!("cargo:rerun-if-changed=src/kernel.cpp");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .include(kernel)
        .opt_level(2)
        .flag_if_supported("-fno-strict-aliasing")
        .flag_if_supported("-Wno-unknown-pragmas")
        .file("src/kernel.cpp")
        .compile("kvcopy_fake");
    // Threads of the library run until the process ends.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
