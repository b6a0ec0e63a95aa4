//! Packages added to a Python guest.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::path::{Path, PathBuf};

use rstest::rstest;
use wardian::sandbox::{
    CacheFolder, ExecRequest, Guest, Limits, RuntimeOptions, SandboxError, WasmRuntime,
};

use super::python;

/// Makes a wheel. The guest itself has what it takes.
fn wheel(folder: &Path, name: &str, files: &str, metadata: &str) -> PathBuf {
    let code = format!(
        "
import sys, zipfile
with zipfile.ZipFile('w', 'w', zipfile.ZIP_DEFLATED) as z:
    for path, text in {files}.items(): z.writestr(path, text)
    z.writestr('p-1.dist-info/WHEEL', 'Wheel-Version: 1.0\\n')
    z.writestr('p-1.dist-info/METADATA', 'Name: p\\nVersion: 1\\n{metadata}')
sys.stdout.buffer.write(open('w', 'rb').read())"
    );
    let outcome = python()
        .exec(&ExecRequest::new(code), &Limits::default())
        .unwrap();
    assert!(outcome.exit.is_success(), "{}", outcome.stderr_text());
    let path = folder.join(name);
    fs_err::write(&path, outcome.stdout).unwrap();
    path
}

fn load(wheel: &Path) -> Result<WasmRuntime, SandboxError> {
    let options = RuntimeOptions {
        guest: Guest::python_with_wheels([wheel])?,
        cache: CacheFolder::Disabled,
        max_instances: 4,
        ..RuntimeOptions::default()
    };
    WasmRuntime::load(&options, |_| {})
}

#[test]
fn a_package_of_a_wheel_can_be_imported() {
    let folder = tempfile::tempdir().unwrap();
    let files = "{'p/__init__.py': 'x = 3', 'p/part.py': 'y = 4', 'p/data.txt': 'text'}";
    let path = wheel(folder.path(), "p-1-py3-none-any.whl", files, "");
    let code = "
import importlib.metadata, p, p.part, sys
print(p.x, p.part.y, importlib.metadata.version('p'), open(p.__path__[0] + '/data.txt').read())
try: open(p.__file__, 'w')
except OSError as e: print(e.strerror)";
    let outcome = load(&path)
        .unwrap()
        .exec(&ExecRequest::new(code), &Limits::default())
        .unwrap();
    assert_eq!(
        outcome.stdout_text(),
        "3 4 1 text\nRead-only file system\n",
        "{}",
        outcome.stderr_text()
    );
}

#[rstest]
#[case::native_code("{'p.py': '', 'q.so': 'ELF'}", "", "native code, q.so")]
#[case::traversal("{'../p.py': ''}", "", "leads elsewhere")]
#[case::another_python("{'p.py': ''}", "Requires-Python: >=3.14", "requires Python >=3.14")]
#[case::a_failing_import(
    "{'p.py': 'import q'}",
    "",
    "importing `p` failed: ModuleNotFoundError: No module named 'q'"
)]
fn a_wheel_that_cannot_be_used_is_named(
    #[case] files: &str,
    #[case] metadata: &str,
    #[case] reason: &str,
) {
    let folder = tempfile::tempdir().unwrap();
    let path = wheel(folder.path(), "p-1-py3-none-any.whl", files, metadata);
    let error = load(&path).unwrap_err().to_string();
    assert!(
        error.contains("p-1-py3-none-any.whl: ") && error.contains(reason),
        "{error}"
    );
}

#[test]
fn a_file_that_is_no_wheel_is_named() {
    let error = Guest::python_with_wheels(["no/p-1-py3-none-any.whl"]).unwrap_err();
    assert!(error.to_string().contains("no/p-1"), "{error}");
}
