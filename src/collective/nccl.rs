//! Sums of tensors on GPUs by NCCL, beside the ranks' TCP connections.

use std::ffi::c_char;
use std::fmt;
use std::time::Duration;

use candle_core::backend::BackendStorage as _;
use candle_core::{CpuStorage, CudaStorage, DType, Device, InplaceOp1, Layout, Tensor};
use cudarc::driver::CudaEvent;
use cudarc::nccl::safe::{Comm, Id, ReduceOp};

use super::{Collective, CollectiveError, DeviceSum, Numbers, OrderedSum, TcpCollective};

/// Bytes of the name that NCCL's ranks find each other by.
const ID_BYTES: usize = 128;
/// How often a sum that runs is looked at.
const TICK: Duration = Duration::from_micros(50);

/// Ranks that sum on their GPUs, and do all else by TCP.
pub struct NcclCollective {
    control: TcpCollective,
    comm: Comm,
}

impl fmt::Debug for NcclCollective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NcclCollective")
            .field("control", &self.control)
            .finish_non_exhaustive()
    }
}

impl NcclCollective {
    /// Lets the ranks of `control`, each with a GPU of its own, find each other.
    ///
    /// # Errors
    ///
    /// Fails where a rank is lost, where `device` is no GPU, or where NCCL fails.
    pub fn new(control: TcpCollective, device: &Device) -> Result<Self, CollectiveError> {
        let Device::Cuda(cuda) = device else {
            return Err(failed("joining", "the model is not on a GPU"));
        };
        let own = if control.is_root() {
            let id = Id::new().map_err(|error| failed("naming the ranks", error.0))?;
            id.internal().iter().map(|c| c.to_ne_bytes()[0]).collect()
        } else {
            Vec::new()
        };
        let named = control.all_gather("naming the ranks for NCCL", own)?;
        let root = named.first().map(Vec::as_slice).unwrap_or_default();
        let bytes: &[u8; ID_BYTES] = root.try_into().map_err(|_| CollectiveError::Malformed {
            rank: 0,
            what: "names for NCCL",
        })?;
        let id = Id::uninit(bytes.map(|byte| c_char::from_ne_bytes([byte])));
        let (rank, size) = (control.rank(), control.world_size());
        let comm = Comm::from_rank(cuda.cuda_stream(), rank, size, id)
            .map_err(|error| failed("joining", error.0))?;
        Ok(Self { control, comm })
    }
}

impl DeviceSum for NcclCollective {
    fn sum(&self, tensor: &Tensor) -> Result<(), CollectiveError> {
        // Once it runs, a sum waits for all ranks for ever.
        self.control.barrier("summing on the GPUs")?;
        let activity = "summing";
        let sum = Sum { comm: &self.comm };
        tensor
            .inplace_op1(&sum)
            .map_err(|error| failed(activity, error))?;
        let event: CudaEvent =
            (self.comm.stream().record_event(None)).map_err(|error| failed(activity, error))?;
        while !(event.try_is_complete()).map_err(|error| failed(activity, error))? {
            if self.control.has_failed() {
                // Dropped, the communicator ends what runs.
                return Err(failed(activity, "a rank was lost meanwhile"));
            }
            std::thread::sleep(TICK);
        }
        Ok(())
    }
}

impl Collective for NcclCollective {
    fn rank(&self) -> usize {
        self.control.rank()
    }

    fn world_size(&self) -> usize {
        self.control.world_size()
    }

    fn all_gather(
        &self,
        activity: &'static str,
        bytes: Vec<u8>,
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.control.all_gather(activity, bytes)
    }

    fn sum(&self, activity: &'static str, sum: OrderedSum) -> Result<Numbers, CollectiveError> {
        self.control.sum(activity, sum)
    }

    fn on_device(&self) -> Option<&dyn DeviceSum> {
        Some(self)
    }

    fn abort(&self, reason: &str) {
        self.control.abort(reason);
    }
}

fn failed(activity: &'static str, reason: impl fmt::Debug) -> CollectiveError {
    CollectiveError::Nccl {
        activity,
        reason: format!("{reason:?}"),
    }
}

/// An all-reduce as candle lets a tensor's storage be written.
struct Sum<'a> {
    comm: &'a Comm,
}

impl InplaceOp1 for Sum<'_> {
    fn name(&self) -> &'static str {
        "all-reduce"
    }

    fn cpu_fwd(&self, _storage: &mut CpuStorage, _layout: &Layout) -> candle_core::Result<()> {
        candle_core::bail!("NCCL sums on GPUs only")
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        let dtype = storage.dtype();
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("a gradient is contiguous")
        };
        let status = match dtype {
            DType::F32 => {
                let mut slice = storage.as_cuda_slice_mut::<f32>()?.slice_mut(start..end);
                self.comm.all_reduce_in_place(&mut slice, &ReduceOp::Sum)
            }
            dtype => candle_core::bail!("a gradient in {dtype:?} is not summed by NCCL"),
        };
        match status {
            Ok(_) => Ok(()),
            Err(error) => candle_core::bail!("NCCL failed: {:?}", error.0),
        }
    }
}
