//! Compiles the kernels' sources with the machine's C++ compiler and launches them.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use super::super::{COMMON, Launch, Operand, Scalar, Source, Variant};

const SHIM: &str = include_str!("shim.hpp");

/// Programs that are compiled, by what they are compiled from.
static PROGRAMS: Mutex<Vec<(Source, Variant, PathBuf)>> = Mutex::new(Vec::new());

/// Returns whether there is a C++ compiler; says so if there is none.
pub(super) fn has_compiler() -> bool {
    let has_one = Command::new("c++")
        .arg("--version")
        .output()
        .is_ok_and(|output| output.status.success());
    if !has_one {
        println!("skipped: there is no `c++` to compile the kernels with");
    }
    has_one
}

/// Runs launches; `target` is what they change, and NaN in `scratch_bytes` what they use between them.
pub(super) fn run(
    launches: &[Launch],
    target: Vec<u8>,
    scratch_bytes: usize,
    inputs: Vec<Vec<u8>>,
) -> Vec<u8> {
    let program = program(launches);
    let mut request = Vec::new();
    let target_len = target.len();
    let mut buffers = vec![target, vec![0xff; scratch_bytes]];
    buffers.extend(inputs);
    let word = |value: usize| u32::try_from(value).unwrap().to_le_bytes();
    request.extend(word(buffers.len()));
    for buffer in &buffers {
        request.extend((buffer.len() as u64).to_le_bytes());
        request.extend(buffer);
    }
    request.extend(word(launches.len()));
    for launch in launches {
        request.extend(word(launch.function.len()));
        request.extend(launch.function.as_bytes());
        for number in launch.grid {
            request.extend(word(number));
        }
        request.extend(word(launch.threads));
        request.extend(word(launch.shared_bytes));
        request.extend(word(launch.operands.len()));
        for operand in &launch.operands {
            request.extend(word(match operand {
                Operand::Target => 0,
                Operand::Scratch => 1,
                Operand::Input(index) => index + 2,
            }));
        }
        request.extend(word(launch.scalars.len()));
        for scalar in &launch.scalars {
            let (kind, bits) = match *scalar {
                Scalar::U32(value) => (0, value.into()),
                Scalar::U64(value) => (1, value),
                Scalar::F64(value) => (2, value.to_bits()),
            };
            request.extend(word(kind));
            request.extend(bits.to_le_bytes());
        }
    }
    let mut child = Command::new(program)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || stdin.write_all(&request));
    let output = child.wait_with_output().unwrap();
    assert!(
        output.status.success(),
        "{}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    writer.join().unwrap().unwrap();
    for (after, before) in changed(&output.stdout, &buffers) {
        assert!(after == before, "an input was changed");
    }
    output.stdout[..target_len].to_vec()
}

/// Returns the inputs as they came back, and as they were.
fn changed<'a>(
    output: &'a [u8],
    buffers: &'a [Vec<u8>],
) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
    let mut at = buffers[0].len() + buffers[1].len();
    buffers[2..].iter().map(move |buffer| {
        at += buffer.len();
        (&output[at - buffer.len()..at], &buffer[..])
    })
}

/// Returns the program of a kernel's launches, which share a source.
fn program(launches: &[Launch]) -> PathBuf {
    let (source, variant) = (launches[0].source, &launches[0].variant);
    let mut programs = PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner);
    let known = (programs.iter()).find(|(known, of, _)| *known == source && of == variant);
    if let Some((.., program)) = known {
        return program.clone();
    }
    // Left to the system's cleaning, as the other tests of this process need it.
    let folder = tempfile::tempdir().unwrap().keep();
    let names = (source.functions.iter())
        .map(|name| format!("    shim::add_kernel(\"{name}\", {name});\n"));
    let main = names.collect::<String>();
    let text = format!(
        "#include <tuple>\n{SHIM}\n{COMMON}\n{}\nint main() {{\n{main}    return shim::serve();\n}}\n",
        source.text
    );
    let path = folder.join("kernels.cpp");
    fs_err::write(&path, text).unwrap();
    let program = folder.join("kernels");
    let output = Command::new("c++")
        .args([
            "-std=c++17",
            "-O1",
            "-w",
            "-ffp-contract=off",
            "-fno-strict-aliasing",
        ])
        .args(variant.arguments())
        .arg(&path)
        .arg("-o")
        .arg(&program)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{} {variant:?}:\n{}",
        source.name,
        String::from_utf8_lossy(&output.stderr)
    );
    programs.push((source, variant.clone(), program.clone()));
    program
}
