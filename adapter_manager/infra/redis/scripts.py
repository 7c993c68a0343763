"""The one Lua script that changes the registry: all of a commit or nothing of it."""

# KEYS[1] epoch, KEYS[2] generation, KEYS[3] changes, KEYS[4] index, KEYS[5..] one record each.
# ARGV[1] the epoch that the caller knows, then per record six values:
#   kind (put, delete, check), expected etag ("*": any, "": absent), value, ttl in ms (0: none),
#   record id, "1" if the record is indexed.
# Returns {"OK", generation} or {"CONFLICT", record id} or {"EPOCH", epoch found}.
# The etag is at bytes 9..24 (from 0) of a record (see records.py). Of the change log the newest 100000
# generations are kept, cut once in 1000 commits: a reader that is further behind reads everything anew.
COMMIT = """
local epoch = redis.call('GET', KEYS[1]) or ''
if epoch ~= ARGV[1] then return {'EPOCH', epoch} end
for i = 5, #KEYS do
  local at = 2 + (i - 5) * 6
  local expected = ARGV[at + 1]
  if expected ~= '*' then
    local now = redis.call('GETRANGE', KEYS[i], 9, 24)
    if now ~= expected then return {'CONFLICT', ARGV[at + 4]} end
  end
end
local generation = redis.call('INCR', KEYS[2])
for i = 5, #KEYS do
  local at = 2 + (i - 5) * 6
  local kind, value, ttl, id, indexed = ARGV[at], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4], ARGV[at + 5]
  if kind == 'put' then
    if ttl == '0' then redis.call('SET', KEYS[i], value) else redis.call('SET', KEYS[i], value, 'PX', ttl) end
    if indexed == '1' then redis.call('ZADD', KEYS[4], 0, id) end
  elseif kind == 'delete' then
    redis.call('DEL', KEYS[i])
    if indexed == '1' then redis.call('ZREM', KEYS[4], id) end
  end
  if kind ~= 'check' and indexed == '1' then redis.call('ZADD', KEYS[3], generation, id) end
end
if generation % 1000 == 0 then redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', generation - 100000) end
return {'OK', generation}
"""

CHANGES_KEPT = 100_000

# KEYS[1] generation; ARGV[1] the minimum. Never lowers it.
RAISE_GENERATION = """
local now = tonumber(redis.call('GET', KEYS[1]) or '0')
if now <= tonumber(ARGV[1]) then redis.call('SET', KEYS[1], ARGV[1]); redis.call('INCR', KEYS[1]) end
return redis.call('GET', KEYS[1])
"""

# A store that holds no epoch takes a new one and generation 0; otherwise nothing happens.
# KEYS[1] epoch, KEYS[2] generation; ARGV[1] a fresh epoch. Returns the epoch that holds from now on.
OPEN = """
local epoch = redis.call('GET', KEYS[1])
if epoch then return epoch end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('SETNX', KEYS[2], '0')
return ARGV[1]
"""

# Puts a whole registry into a store that holds none. KEYS and ARGV as in COMMIT without the checks:
# KEYS[1] epoch, KEYS[2] generation, KEYS[3] changes, KEYS[4] index, KEYS[5..] records;
# ARGV[1] epoch, ARGV[2] generation, then per record its id and value. Returns 1, or 0 where one was there.
RESTORE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
for i = 5, #KEYS do
  local at = 3 + (i - 5) * 2
  redis.call('SET', KEYS[i], ARGV[at + 1])
  redis.call('ZADD', KEYS[4], 0, ARGV[at])
end
redis.call('SET', KEYS[2], ARGV[2])
redis.call('SET', KEYS[1], ARGV[1])
return 1
"""
