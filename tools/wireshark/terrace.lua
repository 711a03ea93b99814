-- Wireshark dissector for Terrace's APPEND (docs/append.md). Copy it to Wireshark's folder of personal Lua plugins, or:
--   tshark -X lua_script:tools/wireshark/terrace.lua -r capture.pcap
--
-- Wireshark's own dissector shows the base transport header of every packet, and the acknowledgement of an APPEND, which
-- has the form of an atomic's. This one adds the APPEND header, the data, and in the acknowledgement the record's
-- offset with the request that it answers.

-- The UDP ports of a host's first processes: RoCEv2's, and those of further instances.
local FIRST_PORT, LAST_PORT = 4791, 4806

local BTH_BYTES, APPEND_ETH_BYTES, AETH_BYTES, ICRC_BYTES = 12, 12, 4, 4
local RC_ATOMIC_ACKNOWLEDGE = 0x12
local COMMIT = 1

local OPCODES = {
    [0xc0] = { name = "RC APPEND First", has_header = true, is_last = false },
    [0xc1] = { name = "RC APPEND Middle", has_header = false, is_last = false },
    [0xc2] = { name = "RC APPEND Last", has_header = false, is_last = true },
    [0xc4] = { name = "RC APPEND Only", has_header = true, is_last = true },
}

local append = Proto("terrace_append", "Terrace APPEND")
local fields = {
    opcode = ProtoField.string("terrace_append.opcode", "Opcode"),
    rkey = ProtoField.uint32("terrace_append.rkey", "Remote key", base.HEX),
    length = ProtoField.uint32("terrace_append.length", "Record length"),
    flags = ProtoField.uint32("terrace_append.flags", "Flags", base.HEX),
    commit = ProtoField.bool("terrace_append.commit", "Commit", 32, nil, COMMIT),
    data = ProtoField.bytes("terrace_append.data", "Data"),
    offset = ProtoField.uint64("terrace_append.offset", "Offset of the record"),
    request = ProtoField.framenum("terrace_append.request", "Last packet of the request", base.NONE, frametype.REQUEST),
}
append.fields = fields

local truncated = ProtoExpert.new("terrace_append.truncated", "Shorter than its headers", expert.group.MALFORMED,
    expert.severity.ERROR)
append.experts = { truncated }

-- Frame of a request's last packet, by its sender, its receiver and its PSN. The latest one wins: PSNs wrap.
local requests = {}

function append.init()
    requests = {}
end

local function key_of(requester, responder, psn)
    return tostring(requester) .. " " .. tostring(responder) .. " " .. psn
end

local function dissect_request(tvb, pinfo, tree, opcode)
    local subtree = tree:add(append, tvb(), "Terrace " .. opcode.name)
    subtree:add(fields.opcode, tvb(0, 1), opcode.name)
    pinfo.cols.info = opcode.name
    local data_at = BTH_BYTES
    if opcode.has_header then
        data_at = BTH_BYTES + APPEND_ETH_BYTES
        if tvb:len() < data_at + ICRC_BYTES then
            subtree:add_proto_expert_info(truncated)
            return
        end
        local length, flags = tvb(BTH_BYTES + 4, 4), tvb(BTH_BYTES + 8, 4)
        subtree:add(fields.rkey, tvb(BTH_BYTES, 4))
        subtree:add(fields.length, length)
        subtree:add(fields.flags, flags)
        subtree:add(fields.commit, flags)
        local commits = flags:uint() % 2 == COMMIT
        pinfo.cols.info = opcode.name .. " length=" .. length:uint() .. (commits and " commit" or "")
    end
    -- Bits 4 and 5 of the BTH's second byte count the padding.
    local data_bytes = tvb:len() - data_at - ICRC_BYTES - math.floor(tvb(1, 1):uint() / 16) % 4
    if data_bytes > 0 then
        subtree:add(fields.data, tvb(data_at, data_bytes))
    end
    if opcode.is_last and not pinfo.visited then
        requests[key_of(pinfo.src, pinfo.dst, tvb(9, 3):uint())] = pinfo.number
    end
end

local answered = {}

local function dissect_answer(tvb, pinfo, tree)
    if not pinfo.visited then
        answered[pinfo.number] = requests[key_of(pinfo.dst, pinfo.src, tvb(9, 3):uint())]
    end
    local request = answered[pinfo.number]
    if not request or tvb:len() < BTH_BYTES + AETH_BYTES + 8 then
        return
    end
    local offset = tvb(BTH_BYTES + AETH_BYTES, 8)
    local subtree = tree:add(append, offset, "Terrace APPEND acknowledgement")
    subtree:add(fields.offset, offset)
    subtree:add(fields.request, request):set_generated()
    pinfo.cols.info:append(" APPEND offset=" .. tostring(offset:uint64()))
end

local ports = DissectorTable.get("udp.port")
local infiniband = ports:get_dissector(FIRST_PORT)

function append.dissector(tvb, pinfo, tree)
    infiniband:call(tvb, pinfo, tree)
    if tvb:len() < BTH_BYTES then
        return
    end
    local byte = tvb(0, 1):uint()
    if OPCODES[byte] then
        dissect_request(tvb, pinfo, tree, OPCODES[byte])
    elseif byte == RC_ATOMIC_ACKNOWLEDGE then
        dissect_answer(tvb, pinfo, tree)
    end
end

for port = FIRST_PORT, LAST_PORT do
    ports:add(port, append)
end
