//! What the rewriter has to know about a module before it starts.

use std::collections::HashMap;

use wasmparser::{ElementItems, FuncType, FunctionBody, Parser, Payload, TypeRef};

use super::outline::{Function, Work};
use super::{MARK, METER, REFILL, malformed, unmetered};
use crate::sandbox::error::SandboxError;

/// Indices, and the code in outline.
#[derive(Debug, Default)]
pub(super) struct Shape {
    /// The number of parameters of each type.
    pub(super) parameters: Vec<u32>,
    /// A type without parameters and results, if there is one.
    pub(super) empty_type: Option<u32>,
    pub(super) imports: u32,
    /// The index of the imported `meter.refill`, if the guest has it.
    pub(super) refill: Option<u32>,
    pub(super) globals: u32,
    /// The functions with code; the first has the index `imports`.
    pub(super) functions: Vec<Function>,
    /// Whether each function's address is taken.
    is_indirect: Vec<bool>,
}

impl Shape {
    pub(super) fn read(wasm: &[u8]) -> Result<Self, SandboxError> {
        let mut shape = Self::default();
        let mut types: Vec<FuncType> = Vec::new();
        let mut function_types = Vec::new();
        let mut taken = Vec::new();
        for payload in Parser::new(0).parse_all(wasm) {
            match payload.map_err(malformed)? {
                Payload::TypeSection(section) => {
                    for (index, ty) in (0..).zip(section.into_iter_err_on_gc_types()) {
                        let ty = ty.map_err(malformed)?;
                        if ty.params().is_empty() && ty.results().is_empty() {
                            shape.empty_type = Some(index);
                        }
                        let count = u32::try_from(ty.params().len()).map_err(malformed)?;
                        shape.parameters.push(count);
                        types.push(ty);
                    }
                }
                Payload::ImportSection(section) => {
                    for import in section.into_imports() {
                        let import = import.map_err(malformed)?;
                        if !matches!(import.ty, TypeRef::Func(_)) {
                            return Err(unmetered("it imports something that is not a function"));
                        }
                        if (import.module, import.name) == REFILL {
                            shape.refill = Some(shape.imports);
                        }
                        shape.imports += 1;
                    }
                }
                Payload::FunctionSection(section) => {
                    for ty in section {
                        function_types.push(ty.map_err(malformed)?);
                    }
                }
                Payload::GlobalSection(section) => shape.globals = section.count(),
                Payload::ExportSection(section) => {
                    for export in section {
                        let name = export.map_err(malformed)?.name;
                        if name == METER || name == MARK {
                            return Err(unmetered(format!("it exports `{name}`")));
                        }
                    }
                }
                Payload::ElementSection(section) => {
                    for element in section {
                        if let ElementItems::Functions(items) = element.map_err(malformed)?.items {
                            for index in items {
                                taken.push(index.map_err(malformed)?);
                            }
                        }
                    }
                }
                Payload::CodeSectionEntry(body) => {
                    let ty = function_types.get(shape.functions.len()).copied();
                    let ty = ty.ok_or_else(|| unmetered("malformed: a body without a type"))?;
                    let function = shape.outline(ty, &body).map_err(malformed)?;
                    shape.functions.push(function);
                }
                _ => {}
            }
        }
        shape.unify(&types)?;
        shape.is_indirect = vec![false; shape.functions.len()];
        for index in taken {
            if let Some(index) = index.checked_sub(shape.imports) {
                *shape
                    .is_indirect
                    .get_mut(index as usize)
                    .ok_or_else(|| unmetered("malformed: an index without a definition"))? = true;
            }
        }
        Ok(shape)
    }

    fn outline(&self, ty: u32, body: &FunctionBody<'_>) -> wasmparser::Result<Function> {
        Function::outline(ty, body, self.imports, self.refill)
    }

    /// Names equal types by one index, as indirect calls do not tell them apart.
    fn unify(&mut self, types: &[FuncType]) -> Result<(), SandboxError> {
        let mut firsts = HashMap::new();
        let unified: Vec<u32> = (0..)
            .zip(types)
            .map(|(index, ty)| *firsts.entry(ty).or_insert(index))
            .collect();
        let functions = u32::try_from(self.functions.len()).map_err(malformed)?;
        for function in &mut self.functions {
            for ty in std::iter::once(&mut function.ty).chain(&mut function.indirect_calls) {
                *ty = *unified
                    .get(*ty as usize)
                    .ok_or_else(|| unmetered("malformed: a type index without a type"))?;
            }
            if function.calls.iter().any(|&callee| callee >= functions) {
                return Err(unmetered("malformed: an index without a definition"));
            }
        }
        Ok(())
    }

    /// Chooses the functions to charge at entry, so that every cycle of the call graph has one.
    ///
    /// Starting from the smallest, for which a charge would weigh most, a function stays free if
    /// it closes no cycle of free ones.
    pub(super) fn charged(&self) -> Vec<bool> {
        let functions = self.functions.len();
        let mut by_type = vec![Vec::new(); self.parameters.len()];
        for (index, function) in self.functions.iter().enumerate() {
            if self.is_indirect[index] {
                by_type[function.ty as usize].push(index);
            }
        }
        let mut order = Vec::from_iter(0..functions);
        order.sort_by_key(|&index| self.functions[index].operators);
        let mut is_free = vec![false; functions];
        // The latest candidate whose search came past a function or a type.
        let mut seen = vec![usize::MAX; functions];
        let mut seen_types = vec![usize::MAX; self.parameters.len()];
        let mut pending = Vec::new();
        for candidate in order {
            let mut closes_cycle = false;
            pending.push(candidate);
            while let Some(index) = pending.pop()
                && !closes_cycle
            {
                let mut visit = |callee: usize| {
                    closes_cycle |= callee == candidate;
                    if is_free[callee] && seen[callee] != candidate {
                        seen[callee] = candidate;
                        pending.push(callee);
                    }
                };
                for &callee in &self.functions[index].calls {
                    visit(callee as usize);
                }
                for &ty in &self.functions[index].indirect_calls {
                    if std::mem::replace(&mut seen_types[ty as usize], candidate) != candidate {
                        by_type[ty as usize].iter().copied().for_each(&mut visit);
                    }
                }
            }
            pending.clear();
            is_free[candidate] = !closes_cycle;
        }
        is_free.into_iter().map(|is_free| !is_free).collect()
    }

    /// Returns whether a function calls itself, directly or by way of others, but not by pointers.
    pub(super) fn recurs(&self, function: usize) -> bool {
        let mut seen = vec![false; self.functions.len()];
        let mut pending = vec![function];
        while let Some(index) = pending.pop() {
            for &callee in &self.functions[index].calls {
                let callee = callee as usize;
                if callee == function {
                    return true;
                }
                if !std::mem::replace(&mut seen[callee], true) {
                    pending.push(callee);
                }
            }
        }
        false
    }

    /// Weighs each function: its own work outside of loops and that of the free functions it calls.
    pub(super) fn weigh(&self, charged: &[bool]) -> Vec<Weight> {
        let mut weights = vec![None; self.functions.len()];
        // Callees first: a function waits on the stack for its free callees, which are in no cycle.
        for root in 0..self.functions.len() {
            let mut stack = vec![root];
            while let Some(&index) = stack.last() {
                let unknown = stack.len();
                let function = &self.functions[index];
                for &callee in &function.calls {
                    let callee = callee as usize;
                    if !charged[callee] && callee != index && weights[callee].is_none() {
                        stack.push(callee);
                    }
                }
                if stack.len() == unknown {
                    weights[index] = Some(Weight::of(&function.work, charged, |callee| {
                        weights[callee].unwrap_or_default()
                    }));
                    stack.pop();
                }
            }
        }
        weights.into_iter().map(Option::unwrap_or_default).collect()
    }
}

/// What a stretch of code is expected to take, with the free functions it calls.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Weight {
    pub(super) operators: f64,
    /// Whether it calls something of unknown weight: through a pointer, or charged itself.
    pub(super) calls_far: bool,
}

impl Weight {
    /// Adds to a stretch's own work that of the free functions in it.
    pub(super) fn of(work: &Work, charged: &[bool], weight: impl Fn(usize) -> Self) -> Self {
        let mut sum = Self {
            operators: work.operators,
            calls_far: work.calls_indirectly,
        };
        for &(callee, times) in &work.calls {
            if charged[callee as usize] {
                sum.calls_far = true;
            } else {
                let callee = weight(callee as usize);
                sum.operators += times * callee.operators;
                sum.calls_far |= callee.calls_far;
            }
        }
        sum
    }
}
