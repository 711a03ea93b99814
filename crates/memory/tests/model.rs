//! Random sequences of every operation that changes keys, against a model that is a list of ranges.

mod common;

use std::collections::HashMap;

use common::*;
use proptest::prelude::*;
use terrace_memory::{
    Access, AccessError, AccessNeed, Accessor, BindError, Limits, NewRange, RegionChange, RegionSpec,
    RegisterError, Registry, WindowBind, WindowKind,
};

const MEMORY: u64 = 8 * PAGE as u64;

#[derive(Clone, Debug)]
enum Step {
    Register { pd: u32, start: u64, len: u64, access: Access },
    Reregister { which: usize, pd: Option<u32>, access: Option<Access>, range: Option<(u64, u64)> },
    Deregister { which: usize },
    AllocWindow { pd: u32, kind: WindowKind },
    Bind { window: usize, region: usize, start: u64, len: u64, access: Access, pd: u32, qpn: u32 },
    Invalidate { window: usize, pd: u32, qpn: u32, remote: bool },
    FreeWindow { window: usize },
    EndQp { qpn: u32 },
    Check { which: usize, pd: u32, qpn: u32, remote: bool, start: u64, len: u64, need: AccessNeed },
}

/// Some flags, more often than not a useful combination.
fn access() -> impl Strategy<Value = Access> {
    prop_oneof![
        Just(ALL),
        Just(Access::LOCAL_WRITE | Access::MW_BIND),
        (0u32..32).prop_map(Access::from_bits_truncate),
    ]
}

fn window_access() -> impl Strategy<Value = Access> {
    prop_oneof![Just(Access::REMOTE_READ), (0u32..16).prop_map(|bits| Access::from_bits_truncate(bits << 1))]
}

fn need() -> impl Strategy<Value = AccessNeed> {
    prop_oneof![Just(AccessNeed::Read), Just(AccessNeed::Write), Just(AccessNeed::Atomic)]
}

fn step() -> impl Strategy<Value = Step> {
    let start = || prop_oneof![Just(0), 0..PAGE as u64, 0..MEMORY];
    let len = || prop_oneof![Just(MEMORY), Just(PAGE as u64), 0..64u64, 0..MEMORY];
    let (pd, qpn, which) = (|| 0u32..2, || 0u32..2, || 0usize..6);
    let kind = prop_oneof![Just(WindowKind::Type1), Just(WindowKind::Type2)];
    prop_oneof![
        2 => (pd(), start(), len(), access())
            .prop_map(|(pd, start, len, access)| Step::Register { pd, start, len, access }),
        1 => (which(), prop::option::of(pd()), prop::option::of(access()), prop::option::of((start(), len())))
            .prop_map(|(which, pd, access, range)| Step::Reregister { which, pd, access, range }),
        1 => which().prop_map(|which| Step::Deregister { which }),
        1 => (pd(), kind).prop_map(|(pd, kind)| Step::AllocWindow { pd, kind }),
        4 => (which(), which(), start(), len(), window_access(), pd(), qpn()).prop_map(
            |(window, region, start, len, access, pd, qpn)| Step::Bind { window, region, start, len, access, pd, qpn }
        ),
        1 => (which(), pd(), qpn(), any::<bool>())
            .prop_map(|(window, pd, qpn, remote)| Step::Invalidate { window, pd, qpn, remote }),
        1 => which().prop_map(|window| Step::FreeWindow { window }),
        1 => qpn().prop_map(|qpn| Step::EndQp { qpn }),
        6 => (which(), pd(), qpn(), any::<bool>(), start(), len(), need()).prop_map(
            |(which, pd, qpn, remote, start, len, need)| Step::Check { which, pd, qpn, remote, start, len, need }
        ),
    ]
}

#[derive(Clone, Copy, Debug)]
struct Range {
    start: u64,
    len: u64,
    access: Access,
    qpn: Option<u32>,
    region: Option<u32>,
}

#[derive(Clone, Copy, Debug)]
enum What {
    Region,
    Window(WindowKind),
}

#[derive(Clone, Copy, Debug)]
struct Object {
    what: What,
    pd: u32,
    range: Option<Range>,
}

struct Model {
    registry: Registry,
    memory: Mapping,
    /// Keys in order of creation, dead ones included.
    keys: Vec<u32>,
    objects: HashMap<u32, Object>,
}

impl Model {
    fn new() -> Model {
        let limits = Limits { regions_max: 5, windows_max: 3, seed: 11 };
        let (registry, memory) = (Registry::new(limits).unwrap(), Mapping::anonymous(MEMORY as usize));
        Model { registry, memory, keys: Vec::new(), objects: HashMap::new() }
    }

    /// A key by number: one of the latest, alive or dead, region or window; 0 when there is none.
    fn pick(&self, which: usize) -> u32 {
        self.keys.iter().rev().nth(which).copied().unwrap_or_default()
    }

    /// The newest key of the same slot: a type 1 window is bound whatever the low 8 bits say.
    fn newest(&self, key: u32) -> u32 {
        self.keys.iter().rev().copied().find(|other| other >> 8 == key >> 8).unwrap_or(key)
    }

    fn count(&self, windows: bool) -> usize {
        self.objects.values().filter(|object| matches!(object.what, What::Window(_)) == windows).count()
    }

    fn windows_on(&self, key: u32) -> bool {
        self.objects.values().any(|object| object.range.is_some_and(|range| range.region == Some(key)))
    }

    /// The result that registering with these arguments must have.
    fn registrable(&self, start: u64, len: u64, access: Access) -> Result<(), RegisterError> {
        let addr = self.memory.addr + start;
        if access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC)
            && !access.contains(Access::LOCAL_WRITE)
        {
            return Err(RegisterError::Invalid("remote write or atomic access needs local write access"));
        }
        // Nothing is mapped behind the memory, and a registration covers whole pages.
        if len > 0 && (addr + len).next_multiple_of(PAGE as u64) > self.memory.addr + MEMORY {
            return Err(RegisterError::NotMapped);
        }
        Ok(())
    }

    fn register(&mut self, pd: u32, start: u64, len: u64, access: Access) {
        let mut expected = self.registrable(start, len, access);
        if expected.is_ok() && self.count(false) == 5 {
            expected = Err(RegisterError::NoRoom);
        }
        let result = self.registry.register(&RegionSpec::new(pd, self.memory.addr + start, len, access));
        assert_eq!(result.map(drop), expected);
        if let Ok(region) = result {
            let range = Range { start: region.start, len, access, qpn: None, region: None };
            assert!(!self.keys.contains(&region.key), "a key was used again");
            self.keys.push(region.key);
            self.objects.insert(region.key, Object { what: What::Region, pd, range: Some(range) });
        }
    }

    /// The region with this key, for reregistration.
    fn changeable(&self, key: u32) -> Result<Object, RegisterError> {
        match self.objects.get(&key) {
            Some(object) if matches!(object.what, What::Region) => {
                if self.windows_on(key) {
                    Err(RegisterError::Busy)
                } else {
                    Ok(*object)
                }
            }
            _ => Err(RegisterError::UnknownKey),
        }
    }

    fn reregister(&mut self, key: u32, pd: Option<u32>, access: Option<Access>, to: Option<(u64, u64)>) {
        let addr = self.memory.addr;
        let range = to.map(|(start, len)| NewRange { addr: addr + start, len, iova: addr + start });
        let result = self.registry.reregister(key, &RegionChange { range, pd, access, paging: None });
        let expected = self.changeable(key).and_then(|mut object| {
            let old = object.range.expect("a region has a range");
            let (start, len) = to.map_or((old.start, old.len), |(start, len)| (addr + start, len));
            let access = access.unwrap_or(old.access);
            self.registrable(start - addr, len, access)?;
            object.pd = pd.unwrap_or(object.pd);
            object.range = Some(Range { start, len, access, ..old });
            Ok(object)
        });
        assert_eq!(result.map(drop), expected.map(drop));
        if let Ok(object) = expected {
            self.objects.insert(key, object);
        }
    }

    fn deregister(&mut self, key: u32) {
        let expected = self.changeable(key).map(drop);
        assert_eq!(self.registry.deregister(key), expected);
        if expected.is_ok() {
            self.objects.remove(&key);
        }
    }

    fn alloc_window(&mut self, pd: u32, kind: WindowKind) {
        let result = self.registry.alloc_window(pd, kind);
        assert_eq!(result.is_ok(), self.count(true) < 3);
        if let Ok(key) = result {
            self.keys.push(key);
            self.objects.insert(key, Object { what: What::Window(kind), pd, range: None });
        }
    }

    fn bind(&mut self, bind: WindowBind) {
        // A dead key may name a live window; see `free_window`.
        if !self.objects.contains_key(&bind.window_key) {
            return;
        }
        let result = self.registry.bind_window(&bind);
        let expected = self.bindable(&bind);
        assert_eq!(result, expected.map(drop));
        if let Ok(range) = expected
            && let Some(window) = self.objects.get_mut(&bind.window_key)
        {
            window.range = range;
        }
    }

    fn bindable(&self, bind: &WindowBind) -> Result<Option<Range>, BindError> {
        let window = self.objects.get(&bind.window_key).ok_or(BindError::UnknownWindow)?;
        let What::Window(kind) = window.what else { return Err(BindError::UnknownWindow) };
        if window.pd != bind.pd {
            return Err(BindError::WrongPd);
        }
        if bind.access.contains(Access::MW_BIND) {
            return Err(BindError::BadAccess);
        }
        if kind == WindowKind::Type2 && window.range.is_some() {
            return Err(BindError::AlreadyBound);
        }
        if bind.len == 0 {
            return if kind == WindowKind::Type2 { Err(BindError::Empty) } else { Ok(None) };
        }
        let region = self.objects.get(&bind.region_key).ok_or(BindError::UnknownRegion)?;
        let (What::Region, Some(range)) = (region.what, region.range) else {
            return Err(BindError::UnknownRegion);
        };
        if region.pd != bind.pd {
            return Err(BindError::WrongPd);
        }
        let writes = bind.access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
        if !range.access.contains(Access::MW_BIND) || writes && !range.access.contains(Access::LOCAL_WRITE) {
            return Err(BindError::RegionForbids);
        }
        if bind.addr < range.start || bind.addr + bind.len > range.start + range.len {
            return Err(BindError::OutOfRange);
        }
        let qpn = (kind == WindowKind::Type2).then_some(bind.qpn);
        let (start, len, region) = (bind.addr, bind.len, Some(bind.region_key));
        Ok(Some(Range { start, len, access: bind.access, qpn, region }))
    }

    fn invalidate(&mut self, key: u32, who: Accessor) {
        let expected = match self.objects.get(&key) {
            None => Err(AccessError::UnknownKey),
            Some(Object { what: What::Region | What::Window(WindowKind::Type1), .. }) => {
                Err(AccessError::Permission)
            }
            Some(window) if window.pd != who.pd => Err(AccessError::WrongPd),
            Some(Object { range: Some(Range { qpn: Some(qpn), .. }), .. }) if *qpn != who.qpn => {
                Err(AccessError::WrongQp)
            }
            Some(_) => Ok(()),
        };
        assert_eq!(self.registry.invalidate(who, key), expected);
        if expected.is_ok()
            && let Some(window) = self.objects.get_mut(&key)
        {
            window.range = None;
        }
    }

    fn free_window(&mut self, key: u32) {
        let alive = matches!(self.objects.get(&key), Some(Object { what: What::Window(_), .. }));
        // The tag of a window's key is not compared, so a dead key may name a live window in the same slot. The model
        // leaves that case out.
        if alive {
            assert_eq!(self.registry.free_window(key), Ok(()));
            self.objects.remove(&key);
        }
    }

    fn end_qp(&mut self, qpn: u32) {
        let tied = |object: &&mut Object| object.range.is_some_and(|range| range.qpn == Some(qpn));
        let count = self.objects.values_mut().filter(tied).map(|object| object.range = None).count();
        assert_eq!(self.registry.invalidate_windows_of(qpn), count);
    }

    fn check(&self, key: u32, who: Accessor, remote: bool, va: u64, len: u64, need: AccessNeed) {
        let expected = self.expected(key, who, remote, va, len, need);
        assert_eq!(self.registry.check(who, key, va, len, need), expected);
        if need == AccessNeed::Read {
            assert_eq!(self.registry.read(who, key, va, &mut vec![0; len as usize]), expected);
        }
        if need == AccessNeed::Write {
            assert_eq!(self.registry.write(who, key, va, &vec![0; len as usize]), expected);
        }
    }

    fn expected(
        &self,
        key: u32,
        who: Accessor,
        remote: bool,
        va: u64,
        len: u64,
        need: AccessNeed,
    ) -> Result<(), AccessError> {
        if len == 0 && need != AccessNeed::Atomic {
            return Ok(());
        }
        let object = self.objects.get(&key).ok_or(AccessError::UnknownKey)?;
        let range = object.range.ok_or(AccessError::UnknownKey)?;
        if !remote && matches!(object.what, What::Window(_)) {
            return Err(AccessError::UnknownKey);
        }
        if object.pd != who.pd {
            return Err(AccessError::WrongPd);
        }
        if range.qpn.is_some_and(|qpn| qpn != who.qpn) {
            return Err(AccessError::WrongQp);
        }
        let permitted = match (remote, need) {
            (false, AccessNeed::Read) => true,
            (false, _) => range.access.contains(Access::LOCAL_WRITE),
            (true, AccessNeed::Read) => range.access.contains(Access::REMOTE_READ),
            (true, AccessNeed::Write) => range.access.contains(Access::REMOTE_WRITE),
            (true, _) => range.access.contains(Access::REMOTE_ATOMIC),
        };
        if !permitted {
            return Err(AccessError::Permission);
        }
        if va < range.start || va + len > range.start + range.len {
            return Err(AccessError::OutOfRange);
        }
        Ok(())
    }

    fn run(&mut self, step: Step) {
        let addr = self.memory.addr;
        let who = |pd, qpn, remote| if remote { Accessor::remote(pd, qpn) } else { Accessor::local(pd, qpn) };
        match step {
            Step::Register { pd, start, len, access } => self.register(pd, start, len, access),
            Step::Reregister { which, pd, access, range } => {
                self.reregister(self.pick(which), pd, access, range)
            }
            Step::Deregister { which } => self.deregister(self.pick(which)),
            Step::AllocWindow { pd, kind } => self.alloc_window(pd, kind),
            Step::Bind { window, region, start, len, access, pd, qpn } => {
                let (window_key, region_key) = (self.newest(self.pick(window)), self.pick(region));
                // The key stays: the tests of windows cover a changed tag.
                self.bind(WindowBind {
                    window_key,
                    new_key: window_key,
                    region_key,
                    addr: addr + start,
                    len,
                    access,
                    pd,
                    qpn,
                });
            }
            Step::Invalidate { window, pd, qpn, remote } => {
                self.invalidate(self.pick(window), who(pd, qpn, remote));
            }
            Step::FreeWindow { window } => self.free_window(self.pick(window)),
            Step::EndQp { qpn } => self.end_qp(qpn),
            Step::Check { which, pd, qpn, remote, start, len, need } => {
                self.check(self.pick(which), who(pd, qpn, remote), remote, addr + start, len, need);
            }
        }
        assert_eq!(self.registry.counts(), (self.count(false) as u32, self.count(true) as u32));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn the_registry_agrees_with_its_model(steps in prop::collection::vec(step(), 1..60)) {
        let mut model = Model::new();
        for step in steps {
            model.run(step);
        }
    }
}
