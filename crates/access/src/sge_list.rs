//! Byte ranges of scatter/gather lists.

use terrace_transport::{LocalError, Sge, SgeList};

/// The program's memory. The session inspects received data, and copies data to send.
pub trait LocalMemory {
    /// Copies `out.len()` bytes from an element, starting `offset` bytes into it. The element is long enough.
    ///
    /// # Errors
    /// If the key or the memory does not permit it.
    fn read(&self, sge: &Sge, offset: u64, out: &mut [u8]) -> Result<(), LocalError>;
}

/// The elements of `length` bytes from `offset` on, each with its offset into the list.
pub(crate) fn sub_elements(sges: &[Sge], offset: u64, length: u64) -> impl Iterator<Item = (u64, Sge)> + '_ {
    let end = offset + length;
    let mut next = 0;
    sges.iter().filter_map(move |sge| {
        let start = next;
        next += u64::from(sge.length);
        let (from, to) = (start.max(offset), next.min(end));
        (from < to).then(|| {
            let sge = Sge { addr: sge.addr + (from - start), length: (to - from) as u32, lkey: sge.lkey };
            (from, sge)
        })
    })
}

/// The list of `length` bytes from `offset` on.
pub(crate) fn sub_list(sges: &[Sge], offset: u64, length: u64) -> SgeList {
    if let [sge] = sges {
        let sge = Sge { addr: sge.addr + offset, length: length as u32, lkey: sge.lkey };
        return SgeList::from_slice(&[sge]);
    }
    sub_elements(sges, offset, length).map(|(_, sge)| sge).collect()
}

/// Copies `out.len()` bytes from a list, starting `offset` bytes into it.
pub(crate) fn gather(
    memory: &impl LocalMemory,
    sges: &[Sge],
    offset: u64,
    out: &mut [u8],
) -> Result<(), LocalError> {
    if let [sge] = sges {
        return memory.read(sge, offset, out);
    }
    for (at, sge) in sub_elements(sges, offset, out.len() as u64) {
        let start = (at - offset) as usize;
        memory.read(&sge, 0, &mut out[start..start + sge.length as usize])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sub_list_has_the_bytes_of_the_range() {
        let sge = |addr, length| Sge { addr, length, lkey: 7 };
        let list = [sge(100, 10), sge(200, 0), sge(300, 5), sge(400, 20)];
        assert_eq!(sub_list(&list, 0, 35)[..], [sge(100, 10), sge(300, 5), sge(400, 20)]);
        assert_eq!(sub_list(&list, 3, 4)[..], [sge(103, 4)]);
        assert_eq!(sub_list(&list, 9, 7)[..], [sge(109, 1), sge(300, 5), sge(400, 1)]);
        assert_eq!(sub_list(&list, 15, 20)[..], [sge(400, 20)]);
        assert_eq!(sub_list(&list, 10, 0)[..], []);
        assert_eq!(sub_list(&list[..1], 2, 3)[..], [sge(102, 3)]);
        let offsets: Vec<u64> = sub_elements(&list, 9, 7).map(|(at, _)| at).collect();
        assert_eq!(offsets, [9, 10, 15]);
    }
}
