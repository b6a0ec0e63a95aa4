//! Launching kernels on a GPU.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use candle_core::cuda_backend::cudarc::driver::sys::{
    CUdevice_attribute, CUdeviceptr, CUfunction_attribute,
};
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaModule, CudaSlice, CudaStream, DevicePtr as _, DevicePtrMut as _,
    LaunchConfig, PushKernelArg as _, SyncOnDrop,
};
use candle_core::cuda_backend::cudarc::nvrtc::{CompileOptions, compile_ptx_with_opts};
use candle_core::cuda_backend::{CudaStorageSlice, DeviceId};
use candle_core::{CudaDevice, CudaStorage, Layout, bail};

use super::{COMMON, DEVICE, Launch, Operand, Scalar, Source, Variant};

/// Shared memory that a kernel has without asking.
const SHARED_BYTES: usize = 48 << 10;

/// A source that is compiled for a variant and loaded on a device, by its name.
type Name = (DeviceId, &'static str, Variant);

static KERNELS: LazyLock<Mutex<HashMap<Name, Kernels>>> = LazyLock::new(Mutex::default);

/// A source's kernels.
struct Kernels {
    module: Arc<CudaModule>,
    /// Those that were launched.
    functions: HashMap<&'static str, CudaFunction>,
}

/// Runs launches one after the other; `inputs` must lie without gaps.
#[expect(
    unsafe_code,
    reason = "a kernel's arguments are not checked by the driver, and zeros would be one more launch"
)]
pub(super) fn run(
    launches: &[Launch],
    target: &mut CudaStorage,
    inputs: &[(&CudaStorage, &Layout)],
    scratch_bytes: usize,
) -> candle_core::Result<()> {
    let device = target.device.clone();
    let stream = device.cuda_stream();
    let mut scratch = None;
    if scratch_bytes > 0 {
        // SAFETY: the first launch writes what the second reads.
        let bytes = unsafe { device.alloc::<u8>(scratch_bytes)? };
        scratch = Some(bytes);
    }
    let (target, _target_guard) = target_pointer(target, &stream)?;
    let (scratch, _scratch_guard) = match &mut scratch {
        Some(scratch) => scratch.device_ptr_mut(&stream),
        None => (target, SyncOnDrop::Sync(None)),
    };
    let mut pointers = Vec::with_capacity(inputs.len());
    for (storage, layout) in inputs {
        pointers.push(input_pointer(storage, layout, &stream)?);
    }
    for launch in launches {
        let function = function(&device, launch)?;
        let operands: Vec<CUdeviceptr> = launch
            .operands
            .iter()
            .map(|operand| match operand {
                Operand::Target => target,
                Operand::Scratch => scratch,
                Operand::Input(index) => pointers[*index].0,
            })
            .collect();
        let mut arguments = stream.launch_builder(&function);
        for operand in &operands {
            arguments.arg(operand);
        }
        for scalar in &launch.scalars {
            match scalar {
                Scalar::U32(value) => arguments.arg(value),
                Scalar::U64(value) => arguments.arg(value),
                Scalar::F64(value) => arguments.arg(value),
            };
        }
        let [x, y, z] = launch.grid.map(number);
        let config = LaunchConfig {
            grid_dim: (x?, y?, z?),
            block_dim: (number(launch.threads)?, 1, 1),
            shared_mem_bytes: number(launch.shared_bytes)?,
        };
        // SAFETY: the operands and numbers are those of the kernel's source, in its order, and the
        // launches are built from the shapes of the tensors that the pointers lead to. `tests` launches
        // the same sources with the same numbers on memory whose bounds are watched.
        let launched = unsafe { arguments.launch(config) };
        launched.map_err(candle_core::Error::wrap)?;
    }
    Ok(())
}

fn number(value: usize) -> candle_core::Result<u32> {
    u32::try_from(value).map_err(candle_core::Error::wrap)
}

/// Returns the kernel of a launch; its source is compiled and loaded at its first use.
fn function(device: &CudaDevice, launch: &Launch) -> candle_core::Result<CudaFunction> {
    let name: Name = (device.id(), launch.source.name, launch.variant.clone());
    let mut all = KERNELS.lock().unwrap_or_else(PoisonError::into_inner);
    let kernels = match all.entry(name) {
        Entry::Occupied(entry) => entry.into_mut(),
        Entry::Vacant(entry) => entry.insert(Kernels {
            module: load(device, launch.source, &launch.variant)?,
            functions: HashMap::new(),
        }),
    };
    if let Some(function) = kernels.functions.get(launch.function) {
        return Ok(function.clone());
    }
    let function = (kernels.module)
        .load_function(launch.function)
        .map_err(candle_core::Error::wrap)?;
    if launch.shared_bytes > SHARED_BYTES {
        let bytes = i32::try_from(launch.shared_bytes).map_err(candle_core::Error::wrap)?;
        function
            .set_attribute(
                CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                bytes,
            )
            .map_err(candle_core::Error::wrap)?;
    }
    kernels.functions.insert(launch.function, function.clone());
    Ok(function)
}

/// Compiles a source and loads it.
fn load(
    device: &CudaDevice,
    source: Source,
    variant: &Variant,
) -> candle_core::Result<Arc<CudaModule>> {
    let stream = device.cuda_stream();
    let context = stream.context();
    let attribute = |attribute| {
        context
            .attribute(attribute)
            .map_err(candle_core::Error::wrap)
    };
    let [major, minor] = [
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    ]
    .map(attribute);
    let mut options = variant.arguments();
    options.push(format!("--gpu-architecture=compute_{}{}", major?, minor?));
    options.push("--fmad=false".to_owned());
    let options = CompileOptions {
        name: Some(format!("{}.cu", source.name)),
        options,
        ..CompileOptions::default()
    };
    let text = format!("{DEVICE}{COMMON}{}", source.text);
    let compiled = compile_ptx_with_opts(text, options)
        .map_err(|error| candle_core::Error::msg(format!("{} kernels: {error}", source.name)))?;
    tracing::debug!(source = source.name, ?variant, "compiled kernels");
    context
        .load_module(compiled)
        .map_err(candle_core::Error::wrap)
}

macro_rules! slices {
    ($storage:expr, $slice:ident => $body:expr) => {
        match $storage {
            CudaStorageSlice::U32($slice) => $body,
            CudaStorageSlice::BF16($slice) => $body,
            CudaStorageSlice::F32($slice) => $body,
            CudaStorageSlice::F64($slice) => $body,
            _ => bail!("no kernels for numbers of this type"),
        }
    };
}

fn input_pointer<'a>(
    storage: &'a CudaStorage,
    layout: &Layout,
    stream: &'a Arc<CudaStream>,
) -> candle_core::Result<(CUdeviceptr, SyncOnDrop<'a>)> {
    let Some((start, _)) = layout.contiguous_offsets() else {
        bail!("expected a contiguous tensor, found {layout:?}")
    };
    fn pointer<'a, T>(
        slice: &'a CudaSlice<T>,
        start: usize,
        stream: &'a Arc<CudaStream>,
    ) -> (CUdeviceptr, SyncOnDrop<'a>) {
        let (pointer, guard) = slice.device_ptr(stream);
        (pointer + (start * size_of::<T>()) as u64, guard)
    }
    Ok(slices!(&storage.slice, slice => pointer(slice, start, stream)))
}

fn target_pointer<'a>(
    storage: &'a mut CudaStorage,
    stream: &'a Arc<CudaStream>,
) -> candle_core::Result<(CUdeviceptr, SyncOnDrop<'a>)> {
    Ok(slices!(&mut storage.slice, slice => slice.device_ptr_mut(stream)))
}
