//! Kernels in CUDA C for devices that are not the CPU, and what they do on the CPU.
//!
//! A kernel is three things: its source in a `.cu` file, compiled at run time by NVRTC for the device and
//! the model that it runs for; a [`Kernel`], which says how it is launched; and the kernel's twin, the
//! same sums in the same order in Rust. On a CPU tensor the twin runs. So all around the kernels (the
//! blocks of keys and values, lists of blocks, tiles) is tested where there is no GPU, and the sources
//! are, too: `tests` compiles them with the machine's C++ compiler and launches them as a device would.
//!
//! None of these has a backward pass: they serve [`Decoder::hidden_cached`](super::Decoder).

#![cfg_attr(
    not(any(feature = "cuda", test)),
    expect(dead_code, reason = "launches are for a GPU and for the tests")
)]

mod attention;
mod blocks;
#[cfg(feature = "cuda")]
mod device;
mod layer;
mod sample;
mod step;

#[cfg(test)]
mod tests;

use candle_core::backend::BackendStorage as _;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, DType, InplaceOp1, Layout, Shape, Storage, Tensor,
    WithDType, bail,
};
use half::bf16;

use super::ops::{HeadShape, KEYS_PER_BLOCK, Real};

pub(super) use self::attention::attend;
pub(crate) use self::blocks::copy_blocks;
pub(super) use self::blocks::write_tokens;
pub(super) use self::layer::{RotaryTable, add_norm, rotate, swiglu};
pub(crate) use self::sample::{Target, sample};
pub(super) use self::step::PagedStep;

/// Threads that run in step, and whose sums are made in a tree.
const WARP: usize = 32;

/// What stands before it where a device compiles it.
#[cfg(feature = "cuda")]
const DEVICE: &str = include_str!("device.cuh");

/// What all sources begin with.
const COMMON: &str = include_str!("common.cuh");

/// How the blocks of a pool `[layers, 2, blocks, 32, kv_heads, head_dim]` lie: for each layer a plane of
/// keys, then one of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PoolLayout {
    pub(crate) layers: usize,
    pub(crate) blocks: usize,
    pub(crate) shape: HeadShape,
}

impl PoolLayout {
    /// Returns the elements of a block in one plane.
    fn block_len(self) -> usize {
        KEYS_PER_BLOCK * self.shape.key_width()
    }

    /// Returns where the keys and the values of a layer begin.
    fn planes(self, layer: usize) -> [usize; 2] {
        [2 * layer, 2 * layer + 1].map(|plane| plane * self.blocks * self.block_len())
    }
}

/// Numbers as the kernels store them; sums are made in `Wide`.
trait Stored: WithDType {
    type Wide: Real;

    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
    fn slice_mut(storage: &mut CpuStorage) -> candle_core::Result<&mut [Self]>;
}

macro_rules! stored {
    ($type:ty, $wide:ty, $variant:ident, $widen:expr, $narrow:expr) => {
        impl Stored for $type {
            type Wide = $wide;

            fn widen(self) -> $wide {
                $widen(self)
            }

            fn narrow(wide: $wide) -> Self {
                $narrow(wide)
            }

            fn slice_mut(storage: &mut CpuStorage) -> candle_core::Result<&mut [Self]> {
                match storage {
                    CpuStorage::$variant(values) => Ok(values),
                    _ => bail!("expected a storage of {}", DType::$variant.as_str()),
                }
            }
        }
    };
}

stored!(
    f32,
    f32,
    F32,
    std::convert::identity,
    std::convert::identity
);
stored!(
    f64,
    f64,
    F64,
    std::convert::identity,
    std::convert::identity
);
stored!(bf16, f32, BF16, bf16::to_f32, bf16::from_f32);

/// Runs `$body` with `$type` as the type of numbers that `$dtype` names.
macro_rules! with_stored {
    ($dtype:expr, $type:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $type = f32;
                $body
            }
            candle_core::DType::F64 => {
                type $type = f64;
                $body
            }
            candle_core::DType::BF16 => {
                type $type = half::bf16;
                $body
            }
            other => candle_core::bail!(
                "no kernels for weights in {}: load them in bf16 or f32",
                other.as_str()
            ),
        }
    };
}
use with_stored;

/// A file of kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Source {
    name: &'static str,
    text: &'static str,
    functions: &'static [&'static str],
}

/// What a source is compiled for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Variant {
    dtype: DType,
    /// Macros and their values.
    defines: Vec<(&'static str, usize)>,
}

impl Variant {
    /// Returns the compiler's arguments.
    fn arguments(&self) -> Vec<String> {
        let real = format!("-DREAL_{}", self.dtype.as_str().to_uppercase());
        let defines = self.defines.iter();
        let defines = defines.map(|(name, value)| format!("-D{name}={value}u"));
        std::iter::once(real).chain(defines).collect()
    }
}

/// A pointer that a kernel gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operand {
    /// To what the kernel makes or changes.
    Target,
    /// To memory for the launches of one kernel.
    Scratch,
    /// To an input.
    Input(usize),
}

/// A number that a kernel gets.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Scalar {
    U32(u32),
    U64(u64),
    F64(f64),
}

impl Scalar {
    fn u32(value: usize) -> candle_core::Result<Self> {
        match u32::try_from(value) {
            Ok(value) => Ok(Self::U32(value)),
            Err(_) => bail!("{value} does not fit in 32 bits"),
        }
    }

    fn u64(value: usize) -> Self {
        Self::U64(value as u64)
    }
}

/// One launch: pointers, then numbers.
#[derive(Debug, Clone)]
struct Launch {
    source: Source,
    variant: Variant,
    function: &'static str,
    grid: [usize; 3],
    threads: usize,
    /// Shared memory that is not part of the source.
    shared_bytes: usize,
    operands: Vec<Operand>,
    scalars: Vec<Scalar>,
}

/// An input on the CPU.
type Input<'a> = (&'a CpuStorage, &'a Layout);

/// Returns the numbers of an input, which must lie without gaps.
fn values<'a, T: WithDType>(input: &Input<'a>) -> candle_core::Result<&'a [T]> {
    let (storage, layout) = input;
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&storage.as_slice::<T>()?[start..end]),
        None => bail!("expected a contiguous tensor, found {layout:?}"),
    }
}

/// What runs on a device, and its twin.
trait Kernel {
    fn name(&self) -> &'static str;
    fn launches(&self) -> candle_core::Result<Vec<Launch>>;

    /// Returns the bytes that the launches use between them.
    fn scratch_bytes(&self) -> usize {
        0
    }
}

/// A kernel that makes a tensor.
trait Make: Kernel {
    fn shape(&self) -> Shape;
    fn dtype(&self) -> DType;
    fn twin(&self, inputs: &[Input<'_>]) -> candle_core::Result<CpuStorage>;
}

/// A kernel that changes a tensor.
trait Change: Kernel {
    fn twin(&self, target: &mut CpuStorage, inputs: &[Input<'_>]) -> candle_core::Result<()>;
}

/// A kernel and its inputs; candle hands over the first of a [`Make`], or the target of a [`Change`].
struct Call<'a, K> {
    kernel: &'a K,
    inputs: &'a [&'a Tensor],
}

/// Makes the tensor of a kernel.
fn make<K: Make>(kernel: &K, inputs: &[&Tensor]) -> candle_core::Result<Tensor> {
    let (first, rest) = inputs.split_first().expect("kernels have inputs");
    first.apply_op1_no_bwd(&Call {
        kernel,
        inputs: rest,
    })
}

/// Runs a kernel on `target`.
fn change<K: Change>(kernel: &K, target: &Tensor, inputs: &[&Tensor]) -> candle_core::Result<()> {
    target.inplace_op1(&Call { kernel, inputs })
}

impl<K> Call<'_, K> {
    /// Runs `run` with the inputs behind `first`, on the CPU.
    fn on_cpu<R>(
        &self,
        first: Option<Input<'_>>,
        run: impl FnOnce(&[Input<'_>]) -> candle_core::Result<R>,
    ) -> candle_core::Result<R> {
        let held: Vec<_> = self.inputs.iter().map(|x| x.storage_and_layout()).collect();
        let mut inputs = Vec::from_iter(first);
        for (storage, layout) in &held {
            match &**storage {
                Storage::Cpu(storage) => inputs.push((storage, *layout)),
                _ => bail!("a kernel's inputs are on different devices"),
            }
        }
        run(&inputs)
    }

    /// Runs the launches with the inputs behind `first`, on the device of `target`.
    #[cfg(feature = "cuda")]
    fn on_device(
        &self,
        target: &mut CudaStorage,
        first: Option<(&CudaStorage, &Layout)>,
    ) -> candle_core::Result<()>
    where
        K: Kernel,
    {
        let held: Vec<_> = self.inputs.iter().map(|x| x.storage_and_layout()).collect();
        let mut inputs = Vec::from_iter(first);
        for (storage, layout) in &held {
            match &**storage {
                Storage::Cuda(storage) => inputs.push((storage, *layout)),
                _ => bail!("a kernel's inputs are on different devices"),
            }
        }
        let launches = self.kernel.launches()?;
        device::run(&launches, target, &inputs, self.kernel.scratch_bytes())
    }

    #[cfg(not(feature = "cuda"))]
    fn on_device(
        &self,
        target: &mut CudaStorage,
        _first: Option<(&CudaStorage, &Layout)>,
    ) -> candle_core::Result<()>
    where
        K: Kernel,
    {
        let device = target.device();
        bail!(
            "`{}` on {device:?} without the feature `cuda`",
            self.kernel.name()
        )
    }
}

impl<K: Make> CustomOp1 for Call<'_, K> {
    fn name(&self) -> &'static str {
        self.kernel.name()
    }

    fn cpu_fwd(
        &self,
        first: &CpuStorage,
        layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let made = self.on_cpu(Some((first, layout)), |inputs| self.kernel.twin(inputs))?;
        Ok((made, self.kernel.shape()))
    }

    fn cuda_fwd(
        &self,
        first: &CudaStorage,
        layout: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        let shape = self.kernel.shape();
        let device = first.device();
        let mut made = uninitialized(device, &shape, self.kernel.dtype())?;
        self.on_device(&mut made, Some((first, layout)))?;
        Ok((made, shape))
    }
}

/// Returns memory that a kernel is about to fill.
#[expect(unsafe_code, reason = "zeros would be one more launch for each kernel")]
fn uninitialized(
    device: &candle_core::CudaDevice,
    shape: &Shape,
    dtype: DType,
) -> candle_core::Result<CudaStorage> {
    use candle_core::backend::BackendDevice as _;
    // SAFETY: every kernel writes each element of what it makes, and nothing reads it before that.
    unsafe { device.alloc_uninit(shape, dtype) }
}

impl<K: Change> InplaceOp1 for Call<'_, K> {
    fn name(&self) -> &'static str {
        self.kernel.name()
    }

    fn cpu_fwd(&self, target: &mut CpuStorage, _layout: &Layout) -> candle_core::Result<()> {
        self.on_cpu(None, |inputs| self.kernel.twin(target, inputs))
    }

    fn cuda_fwd(&self, target: &mut CudaStorage, _layout: &Layout) -> candle_core::Result<()> {
        self.on_device(target, None)
    }
}

/// Returns the sum over a warp as the kernels make it: lanes in a tree, each the same bits.
fn warp_sum<W: Real>(lanes: [W; WARP]) -> W {
    let mut sums = lanes;
    let mut width = WARP / 2;
    while width > 0 {
        for lane in 0..width {
            let other = sums[lane + width];
            sums[lane] += other;
        }
        width /= 2;
    }
    sums[0]
}
