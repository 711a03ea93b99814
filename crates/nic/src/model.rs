//! What a NIC knows of absent memory.

use terrace_memory::RegionPolicy;

/// The model of a device: what it knows of absent memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NicModel {
    /// It knows which pages are absent, and each region has a policy for them.
    #[default]
    Terrace,
    /// It knows nothing. Whatever the policy of a region, READs of absent pages get the signature page, and WRITEs to them
    /// vanish: hardware behind an IOMMU, as NP-RDMA has it (section 3.1).
    Commodity,
}

impl NicModel {
    const NAMES: [(&str, NicModel); 2] = [("terrace", NicModel::Terrace), ("commodity", NicModel::Commodity)];

    /// The policy of a region whose owner wants `policy`.
    pub(crate) fn policy(self, policy: RegionPolicy) -> RegionPolicy {
        match self {
            NicModel::Terrace => policy,
            NicModel::Commodity => RegionPolicy::Commodity,
        }
    }
}

impl std::str::FromStr for NicModel {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<NicModel, &'static str> {
        let named = NicModel::NAMES.iter().find(|(name, _)| *name == text);
        named.map(|(_, model)| *model).ok_or("it is terrace or commodity")
    }
}

impl std::fmt::Display for NicModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        NicModel::NAMES.iter().filter(|(_, model)| model == self).try_for_each(|(name, _)| f.write_str(name))
    }
}
