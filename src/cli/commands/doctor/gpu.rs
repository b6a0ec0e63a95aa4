//! GPUs: whether there are any, whether this program is built for them, and whether one computes.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use candle_core::{DType, Device as TensorDevice, Tensor};

use super::Scope;
use super::finding::Finding;
use crate::causes::with_causes;
use crate::config::Device;
use crate::process::{self, find_program};

/// How long the driver's tool may take.
const TOOL: Duration = Duration::from_secs(15);
/// What is kept of its output.
const MAX_OUTPUT: usize = 64 << 10;
/// The driver's library.
const LIBRARY: &str = "libcuda.so.1";
/// Where it lies besides `LD_LIBRARY_PATH`.
const FOLDERS: [&str; 6] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
];

/// A GPU as the driver's tool tells of it.
#[derive(Debug, Clone, PartialEq)]
struct Gpu {
    name: String,
    driver: String,
    /// Such as 9.0.
    capability: String,
    memory: String,
}

impl Gpu {
    /// Returns the capability as builds name it, such as 90.
    fn number(&self) -> Option<u32> {
        self.capability.replace('.', "").parse().ok()
    }
}

/// What there is of GPUs.
#[derive(Debug)]
struct Found {
    is_built: bool,
    /// What the kernels of this program were compiled for, where that was said.
    built_for: Option<u32>,
    is_wanted: bool,
    /// None without the driver's tool.
    gpus: Option<Result<Vec<Gpu>, String>>,
    has_library: bool,
}

pub(super) fn check(scope: &Scope) -> Vec<Finding> {
    let device = scope.config.model.device;
    if scope.has_run && device == Device::Cpu {
        return Vec::new();
    }
    let found = Found {
        is_built: cfg!(feature = "cuda"),
        built_for: option_env!("CUDA_COMPUTE_CAP").and_then(|text| text.parse().ok()),
        is_wanted: scope.has_run && device == Device::Cuda,
        gpus: find_program(Path::new("nvidia-smi")).map(|program| ask(&program)),
        has_library: has_library(),
    };
    let findings = judge(&found);
    let can_compute = found.is_built && findings.iter().all(Finding::is_fine);
    match can_compute {
        true => findings.into_iter().chain([compute()]).collect(),
        false => findings,
    }
}

fn ask(program: &Path) -> Result<Vec<Gpu>, String> {
    let mut command = Command::new(program);
    command.args([
        "--query-gpu=name,driver_version,compute_cap,memory.total",
        "--format=csv,noheader",
    ]);
    let finished = process::run(&mut command, &[], TOOL, MAX_OUTPUT, |_| false, |_| ());
    let finished = finished.map_err(|error| error.to_string())?;
    if !finished.is_success() {
        let said = format!("{}{}", finished.stdout.text(), finished.stderr.text());
        let why = match finished.timed_out {
            true => format!("it did not end within {TOOL:?}"),
            false => said.trim().to_owned(),
        };
        return Err(why);
    }
    Ok(parse(&finished.stdout.text()))
}

fn parse(table: &str) -> Vec<Gpu> {
    let rows = table.lines().filter_map(|line| {
        let cells: Vec<&str> = line.split(',').map(str::trim).collect();
        let [name, driver, capability, memory] = cells[..] else {
            return None;
        };
        Some(Gpu {
            name: name.to_owned(),
            driver: driver.to_owned(),
            capability: capability.to_owned(),
            memory: memory.to_owned(),
        })
    });
    rows.collect()
}

fn has_library() -> bool {
    let named = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let named = std::env::split_paths(&named).filter(|folder| !folder.as_os_str().is_empty());
    let mut folders = named.chain(FOLDERS.map(PathBuf::from));
    folders.any(|folder| folder.join(LIBRARY).exists())
}

fn judge(found: &Found) -> Vec<Finding> {
    const NAME: &str = "gpu";
    let missing =
        |about: String, fix: String| vec![Finding::missing(NAME, found.is_wanted, about, fix)];
    let gpus = match &found.gpus {
        Some(Ok(gpus)) => gpus.as_slice(),
        Some(Err(reason)) => {
            let about = format!("`nvidia-smi` fails: {reason}");
            let fix = "load the driver's module (`modprobe nvidia`), or install the driver that fits it, and \
                       restart";
            return vec![Finding::missing(
                NAME,
                found.is_built || found.is_wanted,
                about,
                fix,
            )];
        }
        None => &[],
    };
    let Some(first) = gpus.first() else {
        let about = "no GPU of NVIDIA is found: models run on the CPU";
        return match found.is_wanted || found.is_built {
            true => missing(
                about.to_owned(),
                "install the driver, or start the container with `--gpus all`; `--set model.device=cpu` does \
                 without"
                    .to_owned(),
            ),
            false => vec![Finding::fine(NAME, about)],
        };
    };
    let what = format!(
        "{} ({}, compute capability {}, driver {})",
        first.name, first.memory, first.capability, first.driver
    );
    let number = first
        .number()
        .map_or_else(|| "90".to_owned(), |number| number.to_string());
    let build = format!("CUDA_COMPUTE_CAP={number} cargo install --path . --features cuda");
    if !found.is_built {
        let about = format!("{what} is there, and this program is not built for GPUs");
        return missing(about, build);
    }
    if !found.has_library {
        let about = format!("{what} is there, and `{LIBRARY}` is not found");
        let fix = "install the driver's libraries, or name their folder: export LD_LIBRARY_PATH=DIR; a \
                   container wants NVIDIA_DRIVER_CAPABILITIES=compute,utility";
        return vec![Finding::wrong(NAME, about, fix)];
    }
    // Kernels are compiled for one capability and run on it and on later ones of its generation.
    let fits = |built: u32| {
        first
            .number()
            .is_none_or(|has| has >= built && has / 10 == built / 10)
    };
    match found.built_for {
        Some(built) if !fits(built) => {
            let about =
                format!("{what} is there, and the kernels are built for capability {built}");
            vec![Finding::wrong(NAME, about, build)]
        }
        _ => vec![Finding::fine(NAME, what)],
    }
}

/// Adds two numbers on the first GPU, which shows that kernels of ours run on it.
fn compute() -> Finding {
    let add = || -> candle_core::Result<f32> {
        let device = TensorDevice::new_cuda(0)?;
        let ones = Tensor::ones(2, DType::F32, &device)?;
        (ones.clone() + ones)?.sum_all()?.to_scalar()
    };
    let fix = "CUDA_COMPUTE_CAP=<its capability without the point> cargo install --path . --features cuda";
    match add() {
        Ok(4.0) => Finding::fine("gpu", "it computes"),
        Ok(sum) => Finding::wrong(
            "gpu",
            format!("1 + 1, twice, is {sum} on it"),
            "take another GPU",
        ),
        Err(error) => Finding::wrong(
            "gpu",
            format!("it does not compute: {}", with_causes(&error)),
            fix,
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::State;
    use super::*;

    /// As `nvidia-smi` prints it.
    const H200: &str = "NVIDIA H200, 570.86.15, 9.0, 143771 MiB\n";

    fn found(is_built: bool, built_for: Option<u32>, table: Option<&str>) -> Found {
        Found {
            is_built,
            built_for,
            is_wanted: false,
            gpus: table.map(|table| Ok(parse(table))),
            has_library: true,
        }
    }

    #[test]
    fn a_gpu_needs_a_program_that_is_built_for_it() {
        let state = |found: &Found| judge(found)[0].state;
        assert_eq!(state(&found(true, Some(90), Some(H200))), State::Fine);
        assert_eq!(state(&found(true, None, Some(H200))), State::Fine);
        let other = &judge(&found(true, Some(80), Some(H200)))[0];
        assert_eq!(other.state, State::Wrong);
        assert!(
            other
                .fix
                .as_ref()
                .unwrap()
                .starts_with("CUDA_COMPUTE_CAP=90 "),
            "{other:?}"
        );
        let plain = &judge(&found(false, None, Some(H200)))[0];
        assert_eq!(plain.state, State::Note);
        assert!(plain.about.contains("NVIDIA H200 (143771 MiB"), "{plain:?}");
        let none = Found {
            has_library: false,
            ..found(true, Some(90), Some(H200))
        };
        assert!(judge(&none)[0].about.contains("libcuda.so.1"));
    }

    #[test]
    fn without_a_gpu_only_who_wants_one_is_told_off() {
        assert_eq!(judge(&found(false, None, None))[0].state, State::Fine);
        let wanted = Found {
            is_wanted: true,
            ..found(false, None, Some(""))
        };
        let finding = &judge(&wanted)[0];
        assert_eq!(finding.state, State::Wrong);
        assert!(finding.fix.as_ref().unwrap().contains("model.device=cpu"));
        let broken = Found {
            gpus: Some(Err("Driver/library version mismatch".to_owned())),
            ..found(true, None, None)
        };
        assert!(judge(&broken)[0].about.contains("mismatch"));
    }
}
